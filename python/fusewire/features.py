"""What this build of Fusewire has, in Horovod's words. Only `is_homogeneous` needs `init()` before it."""

from __future__ import annotations

from . import _state


def mpi_enabled() -> bool:
    """Whether MPI coordinates the ranks. Never: ranks meet through a torch Store."""
    return False


def mpi_built() -> bool:
    """Whether a data plane over MPI is built in. Not in this version."""
    return False


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads. False where MPI is not used, as here."""
    return False


def gloo_enabled() -> bool:
    """Whether Gloo coordinates the ranks. Never: ranks meet through a torch Store."""
    return False


def gloo_built() -> bool:
    """Whether a data plane over Gloo is built in. Not in this version."""
    return False


def nccl_built() -> int:
    """The version number of the NCCL that is built in; 0 without. Not in this version."""
    return 0


def cuda_built() -> bool:
    """Whether CUDA tensors are supported. Not in this version."""
    return False


def rocm_built() -> bool:
    """Whether ROCm tensors are supported. Never."""
    return False


def ccl_built() -> bool:
    """Whether oneCCL is built in. Never."""
    return False


def ddl_built() -> bool:
    """Whether IBM DDL is built in. Never."""
    return False


def is_homogeneous() -> bool:
    """Whether all hosts of the job have equally many ranks. NotInitializedError before init()."""
    return _state.size() == _state.local_size() * _state.cross_size()
