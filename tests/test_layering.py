"""The arrows of docs/architecture.md, checked on the files themselves.

common <- kernels <- collective <- engine <- torch, common <- control <- engine, common <- transport <- engine: a folder
may include what it points at, and nothing else.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"

# folder -> folders whose headers it may include (its own are always allowed)
MAY_INCLUDE = {
    "common": set(),
    "kernels": {"common"},
    "control": {"common"},
    "transport": {"common"},
    "collective": {"kernels", "common"},
    "engine": {"collective", "kernels", "control", "transport", "common"},
    "torch": {"engine", "collective", "kernels", "control", "transport", "common"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_OR_PYTHON = re.compile(r"^(torch|ATen|c10|caffe2|pybind11|Python\.h|structmember\.h)(/|$)|^Python\.h$")
CUDA = re.compile(r"^(cuda|nccl|cub|cooperative_groups)")

REGISTRY_HOST = re.compile(
    r"(pypi|pythonhosted|debian|ubuntu|npmjs|crates|golang|download\.pytorch)\.(org|com|io|net)", re.IGNORECASE
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|home|work|opt|Users)/\w+")


def sources():
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh", ".inc"})


def includes(path):
    return INCLUDE.findall(path.read_text())


def folder_of(path):
    return path.relative_to(CSRC).parts[0]


def test_every_folder_has_a_place():
    assert {folder_of(p) for p in sources()} <= set(MAY_INCLUDE)
    assert len(sources()) > 10


def test_includes_follow_the_arrows():
    wrong = []
    for path in sources():
        allowed = MAY_INCLUDE[folder_of(path)] | {folder_of(path)}
        for quote, name in includes(path):
            first = name.split("/")[0]
            # "torch/x.h" is ours, <torch/x.h> is PyTorch's.
            if quote == '"' and (first not in allowed or not (CSRC / name).exists()):
                wrong.append(f'{path.relative_to(ROOT)} includes "{name}"')
    assert not wrong


def test_only_the_torch_folder_knows_torch_or_python():
    wrong = [
        f"{path.relative_to(ROOT)} includes <{name}>"
        for path in sources()
        for quote, name in includes(path)
        if folder_of(path) != "torch" and (quote == "<" or not (CSRC / name).exists()) and TORCH_OR_PYTHON.match(name)
    ]
    assert not wrong


def test_the_expensive_torch_header_is_never_included():
    assert not [p for p in sources() if "torch/extension.h" in [name for _, name in includes(p)]]


def test_cuda_headers_only_where_cuda_lives():
    wrong = [
        f"{path.relative_to(ROOT)} includes <{name}>"
        for path in sources()
        for _, name in includes(path)
        if CUDA.match(name)
        and "cuda" not in path.relative_to(CSRC).parts
        and not str(path.relative_to(CSRC)).startswith("collective/nccl")
    ]
    assert not wrong


def test_only_the_mpi_module_includes_mpi():
    """It is a library of its own: everything else works, and is tested, without an MPI."""
    users = {p.relative_to(CSRC) for p in sources() if "mpi.h" in [name for quote, name in includes(p) if quote == "<"]}
    assert users == {Path("collective/mpi/module/mpi_module.cc")}


def test_environment_is_read_in_one_place():
    """Knobs come through Config; nothing else under csrc calls getenv."""
    allowed = {CSRC / "common" / "config.cc", CSRC / "common" / "logging.cc"}
    assert not [
        p for p in sources() if re.search(r"\bgetenv\b", p.read_text()) and p not in allowed and p.suffix != ".h"
    ]


def test_the_extension_is_reached_only_through_python_fusewire():
    """benchmarks and examples use the public API, as a user would."""
    users = [p for folder in ("benchmarks", "examples") for p in (ROOT / folder).rglob("*.py")]
    assert not [p for p in users if re.search(r"fusewire(\.| import )_core", p.read_text())]


def committed_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_names_a_registry_or_a_machine():
    wrong = []
    for path in committed_files():
        if path == Path(__file__) or path.suffix in {".png", ".jpg"} or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if REGISTRY_HOST.search(line) or MACHINE_PATH.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong
