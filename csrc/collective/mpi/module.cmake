# The MPI data plane: its algorithms are part of fusewire_collective and know MPI by mpi_api.h alone; what calls MPI is
# a module of its own, _mpi.so, built where an MPI is found (FUSEWIRE_MPI=OFF: not even looked for). For another MPI
# than the default one: -DMPI_CXX_COMPILER=mpicxx.mpich, in a build folder of its own; FUSEWIRE_MPI_MODULE names the
# module at run time.
file(GLOB mpi_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/collective/mpi/*.cc)
target_sources(fusewire_collective PRIVATE ${mpi_sources})
target_link_libraries(fusewire_collective PUBLIC ${CMAKE_DL_LIBS})

option(FUSEWIRE_MPI "Build the MPI module where an MPI is found" ON)
set(FUSEWIRE_MPI_FOUND OFF)
if(FUSEWIRE_MPI AND (FUSEWIRE_PYTHON OR MPI_CXX_COMPILER))
  set(MPI_CXX_SKIP_MPICXX ON)  # the C interface only
  find_package(MPI QUIET COMPONENTS CXX)
  if(MPI_CXX_FOUND)
    set(FUSEWIRE_MPI_FOUND ON)
    add_library(_mpi MODULE ${CMAKE_SOURCE_DIR}/csrc/collective/mpi/module/mpi_module.cc)
    target_include_directories(_mpi SYSTEM PRIVATE ${MPI_CXX_INCLUDE_DIRS})
    target_link_libraries(_mpi PRIVATE fusewire_flags MPI::MPI_CXX)
    target_link_options(_mpi BEFORE PRIVATE -Wl,--as-needed)  # not the old C++ interface
    set_target_properties(_mpi PROPERTIES PREFIX "" SUFFIX ".so" VISIBILITY_INLINES_HIDDEN ON
                                          LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
    if(TARGET _core)
      add_dependencies(_core _mpi)  # "build _core" means all that is loaded
    endif()
  endif()
endif()
