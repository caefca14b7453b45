"""A stand-in for torch's CUDA device on machines without a GPU.

`install()` makes a CPU-only torch believe in two CUDA devices: tensors on "cuda" lie in host memory, and their
operators are the CPU's, so numbers are the CPU's too. Streams and events are those of the tests' CUDA double, which
finds every use of memory that no event orders (`mistakes()`). Fusewire's engine works on the same double. A process in
which it has been installed keeps it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / f"fake_cuda-{sys.implementation.cache_tag}-{torch.__version__}"


def build() -> Path:
    """Compiles what has changed; one process at a time. RuntimeError with the compiler's words where it cannot."""
    tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    cmake, ninja = (shutil.which(tool, path=tools) for tool in ("cmake", "ninja"))
    if not (cmake and ninja):
        raise RuntimeError("the stand-in for CUDA is built with cmake and ninja, and one of them is not here")
    settings = {
        "FUSEWIRE_FAKE_CUDA": "ON",
        "FUSEWIRE_CUDA": "OFF",
        "FUSEWIRE_TORCH_DIR": Path(torch.__file__).parent,
        "FUSEWIRE_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        "CMAKE_MAKE_PROGRAM": ninja,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = [cmake, "-G", "Ninja", "-S", ROOT, "-B", FOLDER, *(f"-D{k}={v}" for k, v in settings.items())]
        for command in (configure, [cmake, "--build", FOLDER, "--target", "fake_cuda"]):
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the stand-in for CUDA does not build:\n{done.stdout[-6000:]}\n{done.stderr}")
    return FOLDER / "fake_cuda.so"


_library: Path | None = None


def install() -> None:
    """Before the process's first backward, because autograd makes a thread per device then. Idempotent."""
    global _library
    if _library is None:
        from fake_cuda import patches

        if torch.cuda.is_available():
            raise RuntimeError("there is a real GPU here")
        library = build()
        torch.ops.load_library(library)
        patches.apply()
        _library = library


def mistakes() -> list[str]:
    """One sentence per use of memory, by torch or by Fusewire, that nothing ordered. Empty: all waits were there."""
    return list(torch.ops.fake_cuda.mistakes())


_seen = 0


def new_mistakes() -> list[str]:
    """Those since the last call."""
    global _seen
    found = mistakes()[_seen:]
    _seen += len(found)
    return found


_NAME = b"fusewire.cuda_api"


def api_maker():
    """A capsule that makes Fusewire work on the same double, for `fusewire._core._set_cuda_api`."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(torch.ops.fake_cuda.api_maker(), _NAME, None)
