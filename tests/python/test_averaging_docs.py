"""What docs/averaging.md shows runs as it stands; examples/local_sgd.py and benchmarks/averaging.py keep their word."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from averaging_helpers import torch_world
from rank_helpers import ranks

import fusewire as fw

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "averaging.md").read_text(), re.DOTALL)


def test_the_page_has_its_snippets():
    text = "\n".join(SNIPPETS)
    shown = ["averager.average_parameters(", ".attach(", ".averaging(", "LocalSGD(", "HierarchicalModelAverager("]
    assert all(form in text for form in shown)
    assert len(SNIPPETS) == 7


@ranks(2, fresh=True)
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet(number):
    source = SNIPPETS[number]
    with torch_world() if "dist." in source else contextlib.nullcontext():
        found = {}
        exec(compile(source, f"docs/averaging.md, snippet {number}", "exec"), found)
    fw.barrier()
    # The first, the third and the fourth end with an averaging: what is returned must be equal on all ranks.
    return [p.detach() for p in found["model"].parameters()] if number in (0, 2, 3) else None


def run(*command):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example(tmp_path):
    """All four ways end within a point of each other, for fewer bytes; the picture is there."""
    for module in ("sklearn", "matplotlib"):
        pytest.importorskip(module)
    picture = tmp_path / "picture.png"
    text = run(str(ROOT / "examples" / "local_sgd.py"), "--task", "digits", "--plot", str(picture))
    accuracy = {m: float(a) for m, a in re.findall(r"digits, ([\w-]+): accuracy ([\d.]+) %", text)}
    assert set(accuracy) == {"per-step", "periodic", "post-local", "hierarchical"}
    assert max(accuracy.values()) - min(accuracy.values()) <= 1.0
    assert min(accuracy.values()) > 95
    part = {m: int(p) for m, p in re.findall(r"digits\W+([\w-]+) .* (\d+) %\W+\n", text)}
    assert part["per-step"] == 100
    assert part["periodic"] == 12
    assert part["periodic"] < part["post-local"] < part["hierarchical"] < 40
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_benchmark(tmp_path):
    """Its numbers are there, and the one that does not depend on the machine's other work passes."""
    file = tmp_path / "out.json"
    run(str(ROOT / "benchmarks" / "averaging.py"), "--rounds", "2", "--json", str(file))
    written = json.loads(file.read_text())
    assert written["bytes"] == 4 * 25_557_032
    assert written["bars"]["memory"]["verdict"] == "pass"
    assert written["bars"]["time"]["limit"] == pytest.approx(1 / 6)
    for result in written["results"]:
        assert {name: len(samples) for name, samples in result["seconds"].items()} == {"fusewire": 2, "torch, gloo": 2}
        assert result["peaks"]["fusewire"] < 0.1 * result["peaks"]["torch, gloo"]


def test_names_are_public():
    for name in ("HierarchicalModelAverager", "LocalSGD", "ModelAverager", "PeriodicModelAverager"):
        assert name in fw.__all__
        assert getattr(fw, name) is getattr(fw.averaging, name)
