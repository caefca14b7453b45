"""`fusewire bench` end to end on few cases, its report as data, its picture; the examples' promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewire.bench import cases, group, peers, plot, runner, stats, targets, workloads

ROOT = Path(__file__).parents[2]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """(what was printed, the JSON, the picture) of a two-rank run over one case of each kind."""
    folder = tmp_path_factory.mktemp("bench")
    only = "idle,allreduce-float32-1KB,allreduce-float16-16MB,list-1000x1000,*-64KB,training-linear200,watched-4B"
    files = ["--json", str(folder / "out.json"), "--plot", str(folder / "out.png")]
    done = command("-m", "fusewire.bench", "-n", "2", "--quick", "--bars", "--only", only, *files)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "out.json").read_text()), folder / "out.png"


def contenders(data: dict[str, Any], case: str) -> dict[tuple[str, str], dict[str, Any]]:
    result = next(r for r in data["results"] if r["case"] == case)
    return {(c["peer"], c["variant"]): c for c in result["contenders"]}


def test_run_measures_every_contender(quick_run):
    _, data, _ = quick_run
    assert data["schema"] == 1
    assert data["ranks"] == 2
    assert data["quick"] is True
    expected = {
        "idle": {("fusewire", ""), ("gloo", "")},
        "allreduce-float32-1KB": {("fusewire", ""), ("gloo", ""), ("memcpy", "")},
        "allreduce-float16-16MB": {("fusewire", ""), ("gloo", ""), ("memcpy", "")},
        "list-1000x1000": {
            ("fusewire", "async each"),
            ("fusewire", "grouped"),
            ("gloo", "25 MB buckets"),
            ("memcpy", ""),
        },
        "training-linear200": {("none", ""), ("ddp", ""), ("fusewire", "")},
        "allreduce-float32-64KB": {("fusewire", ""), ("gloo", ""), ("memcpy", "")},
        **{f"{operation}-64KB": {("fusewire", ""), ("gloo", "")} for operation in cases.COLLECTIVES},
        "adasum-64KB": {("fusewire", "Adasum"), ("fusewire", "Sum")},
        "watched-4B": {("fusewire", "unwatched"), ("fusewire", "timeline"), ("fusewire", "stats()")},
    }
    assert {r["case"] for r in data["results"]} == set(expected)
    for case, wanted in expected.items():
        found = contenders(data, case)
        assert {key for key in found if key[0] != "mpi"} == wanted
        for contender in found.values():
            assert min(contender["samples"]) == contender["min"]
            assert contender["min"] <= contender["quartiles"][0] <= contender["median"] <= contender["quartiles"][1]
            if case != "idle":
                assert contender["min"] > 0
                assert len(contender["samples"]) >= runner.QUICK.least_rounds


def test_run_reports_bytes_rates_and_extras(quick_run):
    _, data, _ = quick_run
    by_case = {r["case"]: r for r in data["results"]}
    assert by_case["list-1000x1000"]["tensors"] == 1000
    assert by_case["list-1000x1000"]["bytes"] == 4_000_000
    grouped = contenders(data, "list-1000x1000")["fusewire", "grouped"]
    assert grouped["gigabytes_per_second"] == pytest.approx(4e6 / (grouped["median"] / 1e3) / 1e9)
    step = contenders(data, "training-linear200")
    assert step["none", ""]["extra_median"] == 0
    low, high = step["fusewire", ""]["extra_interval"]
    assert low <= step["fusewire", ""]["extra_median"] <= high
    assert {bar["verdict"] for bar in by_case["training-linear200"]["bars"]} <= {"pass", "FAIL"}
    watched = contenders(data, "watched-4B")
    assert watched["fusewire", "unwatched"]["extra_median"] == 0
    assert watched["fusewire", "timeline"]["extra_median"] != 0


def test_mpi_is_measured_or_missing_with_a_reason(quick_run):
    printed, data, _ = quick_run
    found = ("mpi", "") in contenders(data, "allreduce-float32-1KB")
    if found:
        assert "MPI" in data["versions"]["mpi"]
    else:
        reason = data["missing"]["mpi"]
        assert reason
        assert "MPI was not measured" in printed


def test_run_prints_tables_and_writes_a_picture(quick_run):
    printed, _, picture = quick_run
    for text in (
        "Allreduce of one tensor, 2 ranks",
        "1,000 x 1,000",
        "grouped",
        "reducescatter 64 KB",
        "Adasum beside Sum",
        "Training step",
        "What it costs to be watched",
        "% of a core",
        "Bars",
    ):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks(ranks, tmp_path):
    file = tmp_path / "out.json"
    only = "allreduce-float32-64KB,training-linear200"
    done = command("-m", "fusewire.bench", "-n", str(ranks), "--quick", "--only", only, "--json", str(file))
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["ranks"] == ranks
    assert ("fusewire", "") in contenders(data, "allreduce-float32-64KB")


def test_without_mpirun_says_so(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    file = tmp_path / "out.json"
    arguments = ["-n", "2", "--quick", "--only", "allreduce-float32-1KB", "--peers", "mpi,memcpy", "--json", str(file)]
    done = command("-m", "fusewire.bench", *arguments, PATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert "MPI was not measured: mpi" in done.stdout.replace("\n", " ")
    assert re.search("pip install mpi4py|mpirun is not on PATH", json.loads(file.read_text())["missing"]["mpi"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "nothing-like-this"], "no case matches 'nothing-like-this'"),
        (["--peers", "horovod"], "no peer named horovod"),
        (["-n", "0"], "at least 1 rank"),
        (["--plot", "/no/such/folder/x.png"], "there is no directory /no/such/folder"),
    ],
)
def test_wrong_command_lines(arguments, says, capsys):
    from fusewire.bench import main

    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_plot_without_matplotlib_names_the_command(monkeypatch, capsys, tmp_path):
    from fusewire.bench import cli, main

    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "matplotlib" else object())
    assert main(["--plot", str(tmp_path / "x.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_rank_that_dies_is_an_error_in_one_sentence():
    ranks = group.Group(2)
    ranks._processes[1].kill()
    with pytest.raises(group.BenchError, match="rank 1: the process ended"), ranks:
        ranks.call("idle", 0.2)


def test_a_failing_command_names_its_rank_and_leaves_no_process():
    ranks = group.Group(2)
    with pytest.raises(group.BenchError, match="no case is loaded"), ranks:
        ranks.call("prepare", cases.Contender("gloo"))
    assert all(process.poll() is not None for process in ranks._processes)


def test_tensor_lists_are_those_of_the_models():
    resnet, gpt2 = cases.resnet50_shapes(), cases.gpt2_small_shapes()
    assert (len(resnet), sum(map(prod, resnet))) == (161, 25_557_032)
    assert (len(gpt2), sum(map(prod, gpt2))) == (148, 124_439_808)


def test_check_notices_a_wrong_element():
    case = cases.Case("x", "x", "list", (), shapes=((5,), (3, 7)))
    buffers = peers.Buffers(case)
    buffers.fill_pattern(0)
    for tensor in buffers.tensors:
        tensor.mul_(2).add_(1)  # what a sum over two ranks gives
    assert buffers.check_pattern(2) == ""
    buffers.tensors[1][2, 6] += 1
    assert buffers.check_pattern(2).startswith("tensor 1 differs in 1 of 21 elements; first at 20")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_reset_values_survive_the_iterations_of_a_batch(dtype, size):
    value = torch.tensor(peers.GROWTH[dtype][0], dtype=getattr(torch, dtype))
    tiny = torch.finfo(value.dtype).tiny
    for _ in range(peers.growth_limit(dtype, size)):
        assert value >= tiny
        value *= size
    assert torch.isfinite(value)


def test_buckets_keep_order_and_limit():
    tensors = [torch.zeros(n) for n in (10, 10, 300, 5, 5)]
    sizes = [[t.numel() for t in bucket] for bucket in peers.split_into_buckets(tensors, 4 * 25)]
    assert sizes == [[10, 10], [300], [5, 5]]


def test_median_interval_covers_and_narrows():
    few, many = [1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0] * 20
    low, high = stats.median_interval(few)
    assert 1.0 <= low < 3.0 < high <= 5.0
    narrow_low, narrow_high = stats.median_interval(many)
    assert narrow_high - narrow_low < high - low
    assert stats.quantile([0.0, 10.0], 0.25) == 2.5


def measured(peer: str, value: float, extra: float | None = None) -> runner.Measurement:
    return runner.Measurement(cases.Contender(peer), [value] * 3, extra=[] if extra is None else [extra] * 3)


def test_bars_judge_against_the_peers_of_the_same_run():
    case = next(c for c in cases.all_cases() if c.id == "allreduce-float32-64MB")
    result = runner.Result(case, [measured("fusewire", 10), measured("gloo", 49), measured("memcpy", 8)])
    found = {bar.text: bar.verdict for bar in targets.bars(result, cases.Contender("fusewire"), 2)}
    assert found == {"0.2x gloo": "FAIL", "0.333x mpi": "not measured", "1.5x memcpy": "pass"}


def test_other_collectives_are_judged_by_the_faster_peer():
    rules = {"allgather-1MB": ("1x gloo|mpi", 20), "alltoall-64KB": ("2x gloo|mpi", 40)}
    for name, (text, limit) in rules.items():
        case = next(c for c in cases.all_cases() if c.id == name)
        result = runner.Result(case, [measured("fusewire", 30), measured("gloo", 90), measured("mpi", 20)])
        (bar,) = targets.bars(result, cases.Contender("fusewire"), 2)
        assert (bar.text, bar.limit, bar.value) == (text, limit, 30)
        assert bar.verdict == ("FAIL" if limit < 30 else "pass")


def test_adasum_is_judged_by_our_own_sum():
    case = next(c for c in cases.all_cases() if c.id == "adasum-16MB")
    adasum, plain = (cases.Contender("fusewire", variant) for variant in (cases.ADASUM, cases.SUM))
    result = runner.Result(case, [runner.Measurement(adasum, [31.0]), runner.Measurement(plain, [10.0])])
    assert [(bar.text, bar.verdict) for bar in targets.bars(result, adasum, 2)] == [("3x Sum", "FAIL")]
    assert targets.bars(result, plain, 2) == []


@pytest.mark.parametrize("operation", cases.COLLECTIVES)
def test_a_collective_that_gives_a_wrong_result_is_noticed(operation):
    """What rank 1 of 2 gets from a peer that forgets the last element."""
    case = next(c for c in cases.all_cases() if c.id == f"{operation}-64KB")

    class Forgetful(peers.Peer):
        wrong = False

        def collective(self, operation, tensor, size):
            first, second = (torch.arange(len(tensor), dtype=torch.float32) % 97 + r for r in range(2))
            half = len(tensor) // 2
            right = {
                "allgather": torch.cat([first, second]),
                "alltoall": torch.cat([first[half:], second[half:]]),
                "reducescatter": (first + second)[half:],
                "broadcast": first,
            }[operation]

            def step():
                result = tensor.copy_(right) if operation == "broadcast" else right.clone()
                result[-1] += self.wrong
                return result

            return step

    peer, contender = Forgetful(), cases.Contender("gloo")
    workload = workloads.Collective(case, {"gloo": peer}, 1, 2)
    assert workload.check(contender).error == ""
    peer.wrong = True
    assert "wrong" in workload.check(contender).error


def test_training_bar_is_half_of_what_ddp_adds():
    case = next(c for c in cases.all_cases() if c.id == "training-linear200")
    for ours, verdict in ((4.9, "pass"), (5.1, "FAIL")):
        result = runner.Result(case, [measured("ddp", 30, 10), measured("fusewire", 25, ours)])
        assert [bar.verdict for bar in targets.bars(result, cases.Contender("fusewire"), 2)] == [verdict]


def test_being_watched_may_cost_one_per_cent_of_a_training_step():
    case = next(c for c in cases.all_cases() if c.id == "watched-transformer")
    for extra, verdict in ((0.9, "pass"), (1.1, "FAIL")):
        plain, timeline = (cases.Contender("fusewire", variant) for variant in (cases.UNWATCHED, cases.TIMELINE))
        measurements = [runner.Measurement(plain, [100.0]), runner.Measurement(timeline, [100 + extra], extra=[extra])]
        result = runner.Result(case, measurements)
        assert [bar.verdict for bar in targets.bars(result, timeline, 2)] == [verdict]
        assert targets.bars(result, plain, 2) == []


def test_a_timeline_that_has_no_step_is_noticed(monkeypatch):
    import fusewire

    case = next(c for c in cases.all_cases() if c.id == "watched-4B")
    fusewire.init()
    try:
        workload = workloads.Watched(case, {}, 0, 1)
        watched = cases.Contender("fusewire", cases.TIMELINE)
        assert workload.check(watched) == workload.check(cases.Contender("fusewire", cases.STATS))
        assert workload.check(watched).error == ""
        monkeypatch.setattr(fusewire, "start_timeline", lambda path: None)
        monkeypatch.setattr(fusewire, "stop_timeline", lambda: None)
        assert "timeline" in workload.check(watched).error
    finally:
        fusewire.shutdown()


def test_axis_names():
    assert [plot.size_name(n) for n in (4, 1024, 64 << 20)] == ["4 B", "1 KB", "64 MB"]
    assert [plot.rate_name(x) for x in (10, 0.1, 1e-5)] == ["10 GB/s", "100 MB/s", "10 KB/s"]
    assert [plot.number(x) for x in (1148.2, 9.96, 4.881, -0.92)] == ["1148", "10", "4.9", "-0.92"]


@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "powersgd", "topk"])
def test_example_digits_learns_and_ranks_agree(compression):
    """Every compression within a point of none, which reaches 98.6 %."""
    pytest.importorskip("sklearn")
    done = command(str(ROOT / "examples" / "digits.py"), "--compression", compression)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test accuracy ([\d.]+) %", done.stdout)
    assert accuracy
    assert float(accuracy[1]) > 97.6
    checksums = re.findall(r"rank \d of 2: weights ([0-9a-f]{16})", done.stdout)
    assert len(checksums) == 2
    assert len(set(checksums)) == 1


def test_example_char_lm_learns():
    done = command(str(ROOT / "examples" / "char_lm.py"), "--steps", "60")
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    assert "The with statement" in done.stdout
