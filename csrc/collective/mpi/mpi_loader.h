// Finds and loads the module that holds the real MPI.
#pragma once

#include <string>

#include "collective/mpi/mpi_process.h"

namespace fusewire {

// What `fusewire info` and mpi_built() tell. Loads the library, but does not initialise MPI.
struct MpiFacts {
  bool built = false;    // the module is there
  std::string library;   // what it is linked to, in that library's words
  std::string problem;   // why it cannot be used; empty where it can
  bool started = false;  // MPI runs in this process
  std::string threads;   // its thread level, then
};

// `module`: its path; "" means the one beside the library that this code is in.
MpiFacts mpi_facts(const std::string& module);

// This process's MPI. Throws Error(kInvalidArgument) that says why there is none.
MpiProcess& mpi_process(const std::string& module);

// At exit: MpiProcess::finish, if anything was loaded.
void finish_mpi(std::chrono::milliseconds patience);

}  // namespace fusewire
