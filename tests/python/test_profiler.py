"""The engine's work in traces of torch.profiler."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import torch
from rank_helpers import ranks
from torch.profiler import ProfilerActivity, profile

import fusewire as fw


def ranges(profiler):
    return Counter(event.name for event in profiler.events() if event.name.startswith("fusewire::"))


@ranks(2)
def test_every_operation_is_a_range_with_its_phases():
    fw.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        fw.allreduce(torch.ones(10), name="waited for")
        handle = fw.allreduce_async(torch.ones(300_000), name="asynchronous")
        fw.broadcast(torch.ones(10), 0, name="b")
        handle.wait()
        fw.barrier()
    found = ranges(profiler)
    assert found["fusewire::allreduce"] == 2
    assert found["fusewire::broadcast"] == 1
    assert found["fusewire::barrier"] == 1
    assert found["fusewire::negotiate"] == 4
    assert found["fusewire::run"] == 3, "a barrier runs nothing"
    whole = [e for e in profiler.events() if e.name == "fusewire::allreduce"]
    run = [e for e in profiler.events() if e.name == "fusewire::run"]
    assert all(any(w.time_range.start <= r.time_range.start for w in whole) for r in run)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        names = {event.get("name") for event in json.loads(Path(file.name).read_text())["traceEvents"]}
    assert "fusewire::allreduce" in names


@ranks(2)
def test_gradients_are_in_the_trace_of_a_training_step():
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 20)).sum().backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    assert ranges(profiler)["fusewire::allreduce"] >= 4


@ranks(2)
def test_what_is_in_flight_when_the_profiler_stops_or_was_before_it_began_harms_nobody():
    def both(name, size):  # rank 0 submits before rank 1, so its units are in flight when the profiler stops
        return fw.allreduce_async(torch.ones(size), name=name)

    for turn in range(5):
        first, second = f"before {turn}", f"inside {turn}"
        handles = [both(first, 10)] if fw.rank() == 0 else []
        with profile(activities=[ProfilerActivity.CPU]):
            handles += [both(second, 1000)] if fw.rank() == 0 else []
        if fw.rank() == 1:
            handles = [both(first, 10), both(second, 1000)]
        assert [handle.wait().sum().item() for handle in handles] == [10, 1000]
        fw.barrier()


@ranks(2)
def test_without_a_profiler_nothing_is_attached():
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pass
    fw.allreduce(torch.ones(3), name="x")
    assert not ranges(profiler)
