"""The build, its errors, and what an installed package holds."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import types
import zipfile
from pathlib import Path

import pytest
import setuptools
import torch

import fusewire
from fusewire import _build

ROOT = Path(__file__).parents[2]
CHECKOUT = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs the sources")


# What was built for what


def built(**changes):
    facts = {"version": "0.1.0", "torch": "2.13.0+cpu", "cxx11_abi": True} | changes
    return types.SimpleNamespace(**facts)


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.13.0", "2.13.0+cu130"])
def test_one_build_serves_all_devices_of_a_torch_release(found):
    assert _build.mismatch(built(), found, True) is None


@pytest.mark.parametrize("found", ["2.13.1+cpu", "2.14.0", "2.12.0+cpu"])
def test_another_torch_is_named_with_the_command_that_mends_it(found):
    message = _build.mismatch(built(), found, True)
    assert f"built for torch 2.13.0+cpu, but torch {found} is installed" in message
    assert "pip install --no-build-isolation" in message
    assert "\n" not in message


def test_another_abi_is_named():
    message = _build.mismatch(built(), "2.13.0+cpu", False)
    assert "_GLIBCXX_USE_CXX11_ABI=1" in message
    assert "pip install" in message


def test_a_missing_extension_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(_build, "EXTENSION", tmp_path / "_core.so")
    monkeypatch.setattr(_build, "PACKAGE", tmp_path)
    assert "its extension was not built" in _build.mismatch(built(), "2.13.0+cpu", True)
    (tmp_path / "_core.cpython-399-x.so").touch()
    assert "only _core.cpython-399-x.so is there" in _build.mismatch(built(), "2.13.0+cpu", True)


def test_the_record_says_what_is_here():
    record = _build.info()
    assert record.torch == torch.__version__
    assert record.version == fusewire.__version__
    assert record.cxx11_abi == torch.compiled_with_cxx11_abi()
    assert re.match(r"(GNU|Clang|AppleClang) \d+", record.compiler)


def test_import_with_another_torch_is_one_sentence_and_loads_no_extension(tmp_path):
    """The whole way: a package whose record names another torch."""
    package = tmp_path / "fusewire"
    package.mkdir()
    for file in Path(fusewire.__file__).parent.glob("*.py"):
        (package / file.name).write_text(file.read_text())
    (package / _build.EXTENSION.name).write_bytes(b"not an ELF file: must not be loaded")
    (package / "_build_info.py").write_text("torch = '1.0.0'\ncxx11_abi = True\nversion = '0.1.0'\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import fusewire"], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: Fusewire's extension was built for torch 1.0.0, but torch ")
    assert "run `pip install --no-build-isolation" in last


# setup.py


@pytest.fixture
def setup_script(monkeypatch):
    """setup.py as a module, its setup() call recorded instead of run."""
    calls = []
    monkeypatch.setattr(setuptools, "setup", lambda **options: calls.append(options))
    spec = importlib.util.spec_from_file_location("fusewire_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(calls) == 1
    return module


@CHECKOUT
def test_setup_is_thin():
    assert len((ROOT / "setup.py").read_text().splitlines()) < 120


@CHECKOUT
def test_a_missing_torch_is_one_sentence_and_a_command(setup_script, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match=r"compiled against the torch you use, and this Python finds none") as caught:
        setup_script.torch_settings()
    assert f"{sys.executable} -m pip install --no-build-isolation ." in str(caught.value)


@CHECKOUT
@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_a_missing_tool_is_named(setup_script, monkeypatch, tmp_path, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(setup_script.sysconfig, "get_path", lambda key: str(tmp_path))
    with pytest.raises(SystemExit, match=f"built with {name}, which is not here") as caught:
        setup_script.tool(name)
    assert f"pip install {name}" in str(caught.value)


@CHECKOUT
@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, "no C\\+\\+ compiler is here"),
        (
            "#!/bin/sh\necho \"error: invalid value 'c++20'\" >&2; exit 1\n",
            "does not compile C\\+\\+20: error: invalid value",
        ),
        ("not a program", "does not start"),
    ],
)
def test_a_compiler_that_will_not_do_is_named(setup_script, monkeypatch, tmp_path, script, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if script is not None:
        compiler = tmp_path / "old-c++"
        compiler.write_text(script)
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(SystemExit, match=message) as caught:
        setup_script.check_compiler()
    assert "apt-get install g++" in str(caught.value)


@CHECKOUT
def test_the_compiler_in_use_passes_its_own_check(setup_script):
    setup_script.check_compiler()


@CHECKOUT
def test_the_version_is_kept_in_one_place():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split() if name.endswith((".py", ".toml", ".cfg", ".txt", ".cc", ".h"))]
    version = re.escape(fusewire.__version__)
    holders = [n for n in names if re.search(rf"version\w*\s*=\s*.?{version}", (ROOT / n).read_text())]
    assert [name for name in holders if not name.startswith("tests/")] == ["python/fusewire/_version.py"]


@CHECKOUT
def test_a_wheel_holds_the_package_and_works_where_it_is_unpacked(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path,
        ROOT,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fusewire-*.whl")
    assert re.match(rf"fusewire-{fusewire.__version__}-cp3\d+-cp3\d+-linux_", wheel.name)  # not py3-none-any
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {f"fusewire/{_build.EXTENSION.name}", "fusewire/_build_info.py", "fusewire/py.typed"} <= set(names)
    assert "fusewire/bench/__init__.py" in names
    assert not [name for name in names if not name.startswith(("fusewire/", "fusewire-"))]
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    text = (tmp_path / "site" / metadata).read_text()
    assert "License-Expression: Apache-2.0" in text
    assert "\nRequires-Dist: torch\n" in text  # no pin: pip must not fetch another torch
    program = textwrap.dedent("""
        import fusewire, torch
        fusewire.init()
        print(fusewire.__file__, fusewire.allreduce(torch.ones(3), average=False).tolist())
        """)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.stdout.split(maxsplit=1)[1:] == ["[1.0, 1.0, 1.0]\n"], done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))


# The command line


def test_info_says_what_is_built_and_why_a_thing_is_off():
    done = subprocess.run(
        [sys.executable, "-m", "fusewire", "info"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    for expected in (fusewire.__version__, f"found {torch.__version__}", "shm", "not in this version", "launcher"):
        assert expected in done.stdout


def test_info_reports_variables_that_make_no_sense():
    done = subprocess.run(
        [sys.executable, "-m", "fusewire", "info"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200", "RANK": "9", "WORLD_SIZE": "2"},
    )
    assert done.returncode == 1
    assert "RANK=9 must be an integer from 0 to 1" in done.stdout
