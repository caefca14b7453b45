"""What the extension was built for, and whether that is what is here. Looked at before the extension is loaded: built
for another torch it would fail with an undefined symbol, or worse, not fail.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
EXTENSION = PACKAGE / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def info() -> ModuleType | None:
    """The record written when the extension was built: version, torch, cxx11_abi, compiler, build_type."""
    try:
        from . import _build_info
    except ImportError:
        return None
    return _build_info


def check() -> None:
    """ImportError, saying what to do, unless the extension is here and was built for the torch that is installed."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"Fusewire needs PyTorch, and importing it failed ({error}): run `pip install torch`, then `{mend()}`"
        ) from error
    problem = mismatch(info(), torch.__version__, torch.compiled_with_cxx11_abi())
    if problem is not None:
        raise ImportError(problem)


def mismatch(built: ModuleType | None, torch_found: str, cxx11_abi_found: bool) -> str | None:
    """One sentence when an extension with this record cannot be loaded beside that torch."""
    if built is None or not EXTENSION.exists():
        others = sorted(path.name for path in PACKAGE.glob("_core.*.so"))
        here = f"only {', '.join(others)} is there, for another Python" if others else "its extension was not built"
        return f"Fusewire cannot be imported, because {here}: run `{mend()}`"
    if release(built.torch) != release(torch_found):
        return (
            f"Fusewire's extension was built for torch {built.torch}, but torch {torch_found} is installed: "
            f"run `{mend()}`"
        )
    if built.cxx11_abi != cxx11_abi_found:
        return (
            f"Fusewire's extension was built for a torch with _GLIBCXX_USE_CXX11_ABI={int(built.cxx11_abi)}, but the "
            f"installed torch {torch_found} has {int(cxx11_abi_found)}: run `{mend()}`"
        )
    return None


def release(version: str) -> str:
    """2.13.0 of "2.13.0+cpu": the local tag names the devices, and one build serves them all."""
    return version.partition("+")[0]


def mend() -> str:
    """The command that builds the extension for what is installed now."""
    root = PACKAGE.parent.parent
    if (root / "setup.py").exists():
        return f"pip install --no-build-isolation -e {root}"
    return "pip install --no-build-isolation --force-reinstall --no-deps ."
