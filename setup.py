"""Builds the extension fusewire._core: finds torch and the tools, calls CMake, installs what it built.

Everything about *how* the sources are compiled is in CMakeLists.txt.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BUILD = ROOT / "build" / str(sys.implementation.cache_tag)  # kept between builds, so that a second one is quick


def fail(sentence: str, command: str) -> None:
    sys.exit(f"\nerror: {sentence}\n  {command}\n")


def torch_settings() -> dict[str, object]:
    try:
        import torch
    except ImportError as error:
        fail(
            f"Fusewire is compiled against the torch you use, and this Python finds none ({error}); "
            "pip hides it unless told --no-build-isolation.",
            f"{sys.executable} -m pip install torch setuptools cmake ninja"
            f" && {sys.executable} -m pip install --no-build-isolation .",
        )
    folder = Path(torch.__file__).parent
    return {
        "FUSEWIRE_TORCH_DIR": folder,
        "FUSEWIRE_TORCH_VERSION": torch.__version__,
        "FUSEWIRE_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
        "TORCH_INCLUDE_DIRS": f"{folder}/include;{folder}/include/torch/csrc/api/include",
        "TORCH_LIB_DIR": folder / "lib",
    }


def tool(name: str) -> str:
    """The program `name`: beside this Python (where pip puts it) or on PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    return found or fail(
        f"Fusewire is built with {name}, which is not here.", f"{sys.executable} -m pip install {name}"
    )


def cuda_settings() -> dict[str, str]:
    """FUSEWIRE_CUDA=1 demands the CUDA kernels, 0 leaves them out; otherwise they are built where nvcc is found."""
    wanted, choices = os.environ.get("FUSEWIRE_CUDA", ""), {"": "AUTO", "1": "ON", "0": "OFF"}
    if wanted not in choices:
        fail(f"FUSEWIRE_CUDA={wanted!r} is neither 1 nor 0.", "unset FUSEWIRE_CUDA")
    architectures = os.environ.get("FUSEWIRE_CUDA_ARCHITECTURES", "").replace(" ", ";")
    return {"FUSEWIRE_CUDA": choices[wanted], "FUSEWIRE_CUDA_ARCHITECTURES": architectures}


def check_compiler() -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    advice = "apt-get install g++   (or set CXX to GCC >= 11 or Clang >= 14)"
    if not compiler:
        fail("Fusewire is written in C++20 and no C++ compiler is here.", advice)
    probe = "#include <barrier>\n#include <span>\nconcept C = true; int main() { return 0; }"
    probe = probe.replace("concept C", "template <class T> concept C")
    command = [*compiler.split(), "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(command, input=probe, capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"The C++ compiler {compiler} does not start: {error}.", advice)
    if done.returncode:
        fail(f"The C++ compiler {compiler} does not compile C++20: {done.stderr.strip().splitlines()[0]}", advice)


class CMakeBuild(build_ext):
    """Compiles _core in BUILD and puts it, with the record of what it was built for, into the package."""

    def run(self) -> None:
        self.compile()
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "python" / "fusewire" if in_place else Path(self.build_lib) / "fusewire"
        package.mkdir(parents=True, exist_ok=True)
        for name in self.products():
            # Replaced, not overwritten: processes keep what they have loaded.
            os.replace(shutil.copy2(BUILD / name, package / f"{name}.new"), package / name)

    def products(self) -> list[str]:
        names = [f"_core{sysconfig.get_config_var('EXT_SUFFIX')}", "_build_info.py"]
        return names + ["_mpi.so"] * (BUILD / "_mpi.so").exists()  # where an MPI was found

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "fusewire" / name) for name in self.products()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def compile(self) -> None:
        settings = torch_settings() | {
            **cuda_settings(),
            "FUSEWIRE_PYTHON": "ON",
            "FUSEWIRE_VERSION": self.distribution.get_version(),
            "FUSEWIRE_PYTHON_INCLUDE_DIR": sysconfig.get_path("include"),
            "FUSEWIRE_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
            "Python_EXECUTABLE": sys.executable,
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
        }
        check_compiler()
        cmake = tool("cmake")
        arguments = [f"-D{name}={value}" for name, value in settings.items()]
        try:
            subprocess.check_call([cmake, "--no-warn-unused-cli", "-G", "Ninja", "-S", ROOT, "-B", BUILD, *arguments])
            subprocess.check_call([cmake, "--build", BUILD, "--target", "_core"])
        except subprocess.CalledProcessError as error:
            fail("The C++ build failed; its own message is above.", " ".join(map(str, error.cmd)))


setup(ext_modules=[Extension("fusewire._core", sources=[])], cmdclass={"build_ext": CMakeBuild})
