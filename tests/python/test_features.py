"""What a build says about itself, before and after init()."""

import pytest
from rank_helpers import ranks

import fusewire as fw

FALSE = [
    "gloo_enabled",
    "gloo_built",
    "rocm_built",
    "ccl_built",
    "ddl_built",
]


def check():
    for name in FALSE:
        assert getattr(fw, name)() is False, name
    over_mpi = fw._state.data_plane() == "mpi"  # what is said of MPI then: test_mpi.py
    assert fw.mpi_enabled() is over_mpi
    assert fw.mpi_built() is (fw._core.mpi_facts()["problem"] == "")
    assert fw.mpi_threads_supported() is over_mpi  # nobody else starts MPI in these processes
    assert fw.cuda_built() is fw._core.has_cuda_kernels()
    version = fw.nccl_built()
    nccl = fw._core.nccl_facts()
    assert (type(version), version) == (int, 0 if nccl["problem"] else nccl["version"])
    assert nccl["problem"] or (nccl["version"] >= 21900 and nccl["path"])


def test_before_init():
    check()
    assert fw.is_initialized() is False
    with pytest.raises(fw.NotInitializedError):
        fw.is_homogeneous()


@ranks(1, 2)
def test_after_init():
    check()
    assert fw.is_initialized() is True
    assert fw.is_homogeneous() is True
    assert fw.HorovodInternalError is fw.FusewireError
