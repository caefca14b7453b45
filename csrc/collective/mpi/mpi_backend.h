// The data plane of jobs that mpirun or srun has started: CPU tensors, messages by MPI, arithmetic by the project's
// kernels. See mpi_*.cc, one algorithm per file.
#pragma once

#include <memory>

#include "collective/backend.h"
#include "collective/mpi/mpi_link.h"

namespace fusewire {

// `stop` is shared by all members of the set on this host: MPI itself could not tell a member that waits for a message
// of one that is gone.
std::unique_ptr<Backend> make_mpi_backend(std::shared_ptr<MpiJob> job, const MpiOptions& options, StopWord stop);

}  // namespace fusewire
