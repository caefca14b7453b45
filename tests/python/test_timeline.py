"""Timelines through the public API: what they show, how they end, and how they are joined."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from jobs import note
from rank_helpers import error_of, ranks

import fusewire as fw


def events_of(path):
    return json.loads(path.read_text())["traceEvents"]


def lanes(events):
    return {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}


def spans(events, name, phase="B"):
    return [e for e in events if e["ph"] == phase and e["name"] == name]


def check_nesting(events):
    """Begins and ends pair up on every lane, and complete spans lie inside of what is open around them."""
    open_spans = {}
    order = {"E": 0, "X": 1, "B": 2}
    for event in sorted((e for e in events if e["ph"] in order), key=lambda e: e["ts"]):
        stack = open_spans.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            stack.append(event["name"])
        elif event["ph"] == "E":
            assert stack[-1:] == [event["name"]], event
            stack.pop()
    assert not any(open_spans.values()), open_spans


@ranks(2)
def test_a_training_step_is_shown_per_tensor_and_per_bucket():
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    model = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Linear(50, 10))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    fw.start_timeline(folder / "t.json", mark_cycles=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 50)).sum().backward()
        optimizer.step()
    fw.allreduce(torch.ones(300_000), name='odd "name" \\ \n \u20ac')
    fw.barrier()
    fw.stop_timeline()
    fw.allreduce(torch.ones(3), name="not shown")
    events = events_of(folder / f"t.{fw.rank()}.json")
    check_nesting(events)
    names = lanes(events)
    shown = {names[e["tid"]] for e in spans(events, "negotiate")}
    assert 'odd "name" \\ \n \u20ac' in shown
    assert sum("weight" in name for name in shown) == 2, shown
    assert not any("not shown" in name for name in shown)
    buckets = [e for e in spans(events, "allreduce") if names[e["tid"]] == "buckets"]
    contents = [name for e in buckets for name in e["args"]["tensors"]]
    assert len(contents) == 3 * 4 + 1
    assert {e["args"]["dtype"] for e in buckets} == {"float32"}
    big = next(e for e in buckets if any(name.startswith("odd") for name in e["args"]["tensors"]))
    assert big["args"]["bytes"] == 1_200_000
    for step in ("pack", "reduce", "unpack"):
        assert any(e["tid"] == big["tid"] and e["ts"] >= big["ts"] for e in spans(events, step, "X")), step
    assert spans(events, "cycle", "i")
    ready = [e for e in events if e["ph"] == "i" and e["name"].endswith("is ready")]
    assert {e["args"]["rank"] for e in ready} == ({0, 1} if fw.rank() == 0 else set())


@ranks(2)
def test_it_is_a_clear_error_to_start_twice_or_nowhere():
    error = error_of(fw.start_timeline, "/nowhere/t.json")
    assert isinstance(error, ValueError)
    assert "/nowhere/t" in str(error)
    fw.stop_timeline()  # nothing runs: nothing happens
    with tempfile.TemporaryDirectory() as folder:
        fw.start_timeline(f"{folder}/t.json")
        error = error_of(fw.start_timeline, f"{folder}/u.json")
        fw.stop_timeline()
    assert isinstance(error, ValueError)
    assert "stop_timeline()" in str(error)


def killed_at_work(path):
    fw.init()
    fw.start_timeline(path)
    numbers = 0
    while True:
        fw.allreduce(torch.ones(1000), name=f'layer "{numbers % 50}"')
        fw.allreduce(torch.ones(200_000), name="big")
        numbers += 1
        if numbers == 100:
            note(working=True)


def until_written(files, events):
    """Until each of them holds so many events; they are read while they are being written, so as text."""
    deadline = time.monotonic() + 60
    while any(file.read_bytes().count(b'"ph"') < events for file in files):
        assert time.monotonic() < deadline, f"no {events} events in a minute"
        time.sleep(0.01)


def test_the_file_is_valid_after_sigkill(launcher, tmp_path):
    """At whatever moment, many times: the processes write without a pause."""
    for attempt in range(4):
        path = tmp_path / f"{attempt}.json"
        with launcher.start(killed_at_work, 2, str(path)) as job:
            job.until_noted(0, "working")
            files = [tmp_path / f"{attempt}.{rank}.json" for rank in (0, 1)]
            until_written(files, 700 * attempt)
            for pid in job.pids.values():
                os.kill(pid, signal.SIGKILL)
            job.wait(20)
        for file in files:
            events = events_of(file)
            assert len(events) >= 700 * attempt
            assert attempt == 0 or spans(events, "negotiate")


def hang():
    fw.init()
    fw.allreduce(torch.ones(4), name="together")
    if fw.rank() == 0:
        fw.allreduce_async(torch.ones(4), name="waits for ever")
    time.sleep(60)


def test_what_never_ends_is_in_the_file_of_a_killed_rank(launcher, tmp_path):
    """The variable alone switches it on, Horovod's as well; a span that hangs has a begin and no end."""
    env = {"HOROVOD_TIMELINE": str(tmp_path / "t.{rank}.json")}
    with launcher.start(hang, 2, env=env) as job:
        path = tmp_path / "t.0.json"
        deadline = time.monotonic() + 20
        while not path.exists() or "waits for ever" not in path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(job.pids[0], signal.SIGKILL)
    events = events_of(path)
    names = lanes(events)
    begun = [names[e["tid"]] for e in spans(events, "negotiate")]
    ended = [names[e["tid"]] for e in spans(events, "negotiate", "E")]
    assert begun == ["together", "waits for ever"]
    assert ended == ["together"]


def two_ranks(path):
    fw.init(timeline=path)
    for i in range(3):
        fw.allreduce(torch.ones(10), name=f"t{i}")
    fw.shutdown()


@pytest.fixture
def two_timelines(launcher, tmp_path):
    for end in launcher.run(two_ranks, 2, str(tmp_path / "t.json")):
        assert end.code == 0, end.errors
    return tmp_path


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fusewire", "timeline", *map(str, arguments)], capture_output=True, text=True
    )


def test_merge_makes_ranks_processes(two_timelines):
    done = command("merge", two_timelines / "all.json", two_timelines)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 timelines" in done.stdout
    events = events_of(two_timelines / "all.json")
    check_nesting(events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [processes[rank].split(" (")[0] for rank in (0, 1)] == ["rank 0 of 2", "rank 1 of 2"]
    times = [[e["ts"] for e in spans(events, "negotiate") if e["pid"] == rank] for rank in (0, 1)]
    assert all(abs(a - b) < 5e6 for a, b in zip(*times, strict=True)), "one clock"
    # Again, with a pattern; its own output is no input.
    assert fw._timeline.merge(two_timelines / "all.json", [str(two_timelines / "*.json")]) == 2
    assert len(events_of(two_timelines / "all.json")) == len(events)


def test_merge_of_files_with_the_same_rank_keeps_them_apart(two_timelines):
    one = two_timelines / "t.0.json"
    copy = two_timelines / "copy.json"
    copy.write_text(one.read_text())
    assert fw._timeline.merge(two_timelines / "out.json", [one, copy]) == 2
    assert {e["pid"] for e in events_of(two_timelines / "out.json")} == {0, 1}


def test_merge_says_what_is_no_timeline(tmp_path):
    (tmp_path / "x.json").write_text("[1]")
    done = command("merge", tmp_path / "out.json", tmp_path)
    assert done.returncode == 1
    assert "x.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert "no/such" in command("merge", tmp_path / "out.json", "no/such/*.json").stderr
    assert not (tmp_path / "out.json").exists()
