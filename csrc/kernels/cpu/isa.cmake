# Adds csrc/kernels/cpu to fusewire_kernels: one source, compiled once per instruction set. select.cc picks at run time.
function(fusewire_isa name)
  add_library(fusewire_kernels_${name} OBJECT ${CMAKE_SOURCE_DIR}/csrc/kernels/cpu/table.cc)
  target_link_libraries(fusewire_kernels_${name} PRIVATE fusewire_flags)
  target_compile_definitions(fusewire_kernels_${name} PRIVATE FUSEWIRE_ISA=${name})
  target_compile_options(fusewire_kernels_${name} PRIVATE ${ARGN})
  target_sources(fusewire_kernels PRIVATE $<TARGET_OBJECTS:fusewire_kernels_${name}>)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  fusewire_isa(sse2)
  fusewire_isa(avx2 -mavx2 -mf16c)
  # GCC 12 sees uninitialised operands inside its own AVX-512 intrinsics.
  fusewire_isa(avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c -mprefer-vector-width=512
               -Wno-maybe-uninitialized)
  target_compile_definitions(fusewire_kernels PRIVATE FUSEWIRE_X86)
else()
  fusewire_isa(neon)  # 16-byte vectors by whatever the compiler's default target offers
  target_compile_definitions(fusewire_kernels PRIVATE FUSEWIRE_NEON)
endif()
