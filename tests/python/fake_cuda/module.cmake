# A stand-in for torch's CUDA device, for tests on machines without a GPU; tests/python/fake_cuda/__init__.py builds it.
file(GLOB fake_cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc)
add_library(fake_cuda MODULE ${fake_cuda_sources})
target_include_directories(fake_cuda PRIVATE ${CMAKE_SOURCE_DIR}/tests/python)
target_include_directories(fake_cuda SYSTEM PRIVATE ${FUSEWIRE_TORCH_DIR}/include
                                                    ${FUSEWIRE_TORCH_DIR}/include/torch/csrc/api/include)
target_link_libraries(fake_cuda PRIVATE fusewire_simt)
target_compile_options(fake_cuda PRIVATE -O1)
foreach(library c10 torch_cpu)
  target_link_libraries(fake_cuda PRIVATE ${FUSEWIRE_TORCH_DIR}/lib/lib${library}.so)
endforeach()
set_target_properties(fake_cuda PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}
                      BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH ${FUSEWIRE_TORCH_DIR}/lib)
