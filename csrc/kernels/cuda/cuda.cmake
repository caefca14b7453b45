# The CUDA kernels: the library fusewire_kernels_cuda, where nvcc is found and works, or FUSEWIRE_CUDA=ON demands it.
# Sets FUSEWIRE_CUDA_BUILT (the architectures, or "") and FUSEWIRE_CUDA_REASON (why it is not built) for _build_info.py.
# Nothing is linked but the static runtime, which finds the driver when it is first used: the result loads on machines
# without a GPU.
set(FUSEWIRE_CUDA AUTO CACHE STRING "Compile the CUDA kernels: ON, OFF, or AUTO (where nvcc is found)")
set(FUSEWIRE_CUDA_ARCHITECTURES "" CACHE STRING "Of the CUDA kernels, as CMAKE_CUDA_ARCHITECTURES; empty: 80 to 100")
set(FUSEWIRE_CUDA_BUILT "")
set(FUSEWIRE_CUDA_REASON "")

if(FUSEWIRE_CUDA STREQUAL "AUTO" AND FUSEWIRE_SANITIZE)
  set(FUSEWIRE_CUDA_REASON "a sanitizer's build")
elseif(FUSEWIRE_CUDA STREQUAL "AUTO" OR FUSEWIRE_CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE) # it may have come since the last time
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real) # of CMake's own trials: its default is too old for nvcc 13
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(FUSEWIRE_CUDA_REASON "no working nvcc was found (on PATH, in /usr/local/cuda, or named by CUDACXX)")
  endif()
else()
  set(FUSEWIRE_CUDA_REASON "switched off by FUSEWIRE_CUDA")
endif()

if(FUSEWIRE_CUDA_REASON)
  if(FUSEWIRE_CUDA AND NOT FUSEWIRE_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "FUSEWIRE_CUDA demands the CUDA kernels, but ${FUSEWIRE_CUDA_REASON}.")
  endif()
  message(STATUS "CUDA kernels: left out, ${FUSEWIRE_CUDA_REASON}")
  return()
endif()

enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
set(FUSEWIRE_CUDA_BUILT "${FUSEWIRE_CUDA_ARCHITECTURES}")
if(NOT FUSEWIRE_CUDA_BUILT)
  set(FUSEWIRE_CUDA_BUILT 80-real 90) # the last one as PTX too, for what comes later
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    set(FUSEWIRE_CUDA_BUILT 80-real 90-real 100)
  endif()
endif()
message(STATUS "CUDA kernels: ${FUSEWIRE_CUDA_BUILT}, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")

file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/kernels/cuda/*.cu)
add_library(fusewire_kernels_cuda STATIC ${cuda_sources})
target_include_directories(fusewire_kernels_cuda PUBLIC ${CMAKE_SOURCE_DIR}/csrc)
# No fused multiply-add: the same bits as on the CPU, where none is used either.
target_compile_options(fusewire_kernels_cuda PRIVATE -fmad=false --Werror=all-warnings
                                                     -Xcompiler=-Wall,-Wextra,-Werror,-ffp-contract=off)
target_link_libraries(fusewire_kernels_cuda PUBLIC CUDA::cudart_static)
set_target_properties(fusewire_kernels_cuda PROPERTIES
  CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_ARCHITECTURES "${FUSEWIRE_CUDA_BUILT}"
  CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)

# CudaApi on the runtime: the only C++ here that sees a CUDA header.
add_library(fusewire_cuda_runtime STATIC ${CMAKE_SOURCE_DIR}/csrc/collective/cuda/runtime.cc)
target_link_libraries(fusewire_cuda_runtime PUBLIC fusewire_collective fusewire_kernels_cuda)
target_include_directories(fusewire_cuda_runtime SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
