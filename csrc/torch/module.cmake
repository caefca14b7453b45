# The extension module fusewire/_core, against the torch found at FUSEWIRE_TORCH_DIR (default: the one Python_EXECUTABLE
# imports). torch is linked by hand: find_package(Torch) would drag in its CUDA toolchain checks and C++ standard.

if(NOT Python_EXECUTABLE)
  find_package(Python REQUIRED COMPONENTS Interpreter)
endif()

# fusewire_ask_python(variable expression): what Python says, unless the variable is set already.
function(fusewire_ask_python variable expression)
  if(NOT ${variable})
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c "import importlib.util, pathlib, sysconfig; print(${expression})"
      OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    set(${variable} ${answer} CACHE STRING "${expression}")
  endif()
endfunction()
fusewire_ask_python(FUSEWIRE_TORCH_DIR "pathlib.Path(importlib.util.find_spec('torch').origin).parent")
fusewire_ask_python(FUSEWIRE_PYTHON_INCLUDE_DIR "sysconfig.get_path('include')")
fusewire_ask_python(FUSEWIRE_EXTENSION_SUFFIX "sysconfig.get_config_var('EXT_SUFFIX')")

file(GLOB torch_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/torch/*.cc)
add_library(_core MODULE ${torch_sources})
target_link_libraries(_core PRIVATE fusewire_flags fusewire_engine)
if(FUSEWIRE_CUDA_BUILT)
  target_link_libraries(_core PRIVATE fusewire_cuda_runtime)
  target_compile_definitions(_core PRIVATE FUSEWIRE_WITH_CUDA)
endif()
foreach(library c10 torch_cpu torch_python)
  target_link_libraries(_core PRIVATE ${FUSEWIRE_TORCH_DIR}/lib/lib${library}.so)
endforeach()
# pybind11 is the one that torch bundles: only modules built with the same internals can exchange torch's classes.
target_include_directories(_core SYSTEM PRIVATE ${FUSEWIRE_TORCH_DIR}/include
                                                ${FUSEWIRE_TORCH_DIR}/include/torch/csrc/api/include
                                                ${FUSEWIRE_PYTHON_INCLUDE_DIR})
# Torch's headers cost 10 s in each file; once is enough.
target_precompile_headers(_core PRIVATE <torch/csrc/utils/pybind.h> <torch/csrc/autograd/engine.h>)
set_target_properties(_core PROPERTIES
  PREFIX "" SUFFIX "${FUSEWIRE_EXTENSION_SUFFIX}" CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../torch/lib")

if(EXISTS ${CMAKE_SOURCE_DIR}/cmake/build_info.py.in)
  fusewire_ask_python(FUSEWIRE_TORCH_VERSION "__import__('importlib.metadata').metadata.version('torch')")
  fusewire_ask_python(FUSEWIRE_CXX11_ABI "int(__import__('torch').compiled_with_cxx11_abi())")
  configure_file(${CMAKE_SOURCE_DIR}/cmake/build_info.py.in ${CMAKE_BINARY_DIR}/_build_info.py @ONLY)
endif()
