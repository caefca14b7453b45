"""What a build says about itself, before and after init()."""

import pytest
from rank_helpers import ranks

import fusewire as fw

FALSE = [
    "mpi_enabled",
    "mpi_built",
    "mpi_threads_supported",
    "gloo_enabled",
    "gloo_built",
    "cuda_built",
    "rocm_built",
    "ccl_built",
    "ddl_built",
]


def check():
    for name in FALSE:
        assert getattr(fw, name)() is False, name
    version = fw.nccl_built()
    assert (type(version), version) == (int, 0)


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
