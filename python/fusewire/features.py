"""What this build of Fusewire has, in Horovod's words. Only `is_homogeneous` needs `init()` before it."""

from __future__ import annotations

from . import _core, _state


def mpi_enabled() -> bool:
    """Whether MPI moves the data of this job: it was chosen (`FUSEWIRE_BACKEND=mpi`) and runs."""
    return _state.data_plane() == "mpi"


def mpi_built() -> bool:
    """Whether the data plane over MPI is built and its library can be loaded. `fusewire info` says why not."""
    facts = _core.mpi_facts()
    return facts["built"] and not facts["problem"]


def mpi_threads_supported() -> bool:
    """Whether MPI runs in this process, started by Fusewire or not, with MPI_THREAD_MULTIPLE: the script may call MPI
    from any thread, also while operations are pending."""
    return _core.mpi_facts()["threads"] == "MPI_THREAD_MULTIPLE"


def gloo_enabled() -> bool:
    """Whether Gloo coordinates the ranks. Never: ranks meet through a torch Store."""
    return False


def gloo_built() -> bool:
    """Whether a data plane over Gloo is built in. Not in this version."""
    return False


def nccl_built() -> int:
    """The version number (22803 for 2.28.3) of the NCCL that torch has loaded and Fusewire can use; 0 without.
    `fusewire info` says why there is none."""
    facts = _core.nccl_facts()
    return 0 if facts["problem"] else facts["version"]


def cuda_built() -> bool:
    """Whether the CUDA kernels are compiled in, without which CUDA tensors are not supported. `fusewire info` says for
    which GPUs, or why not."""
    return _core.has_cuda_kernels()


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
