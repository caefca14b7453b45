"""init and shutdown: repeated, in cycles, too early, too late, with work pending, and alone."""

import os
import re
import threading
import time

import pytest
import torch
from jobs import note
from rank_helpers import error_of, ranks

import fusewire as fw


def resources():
    """Threads, open files and mapped segments of this process."""
    with open("/proc/self/maps") as maps:
        segments = [line for line in maps if "memfd:" in line or "/dev/shm" in line]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "segments": len(segments),
    }


def settled(before):
    """The resources, once they are as before or have not come down to that in 5 seconds: a thread that has been joined
    is still in the kernel's list for a moment."""
    deadline = time.monotonic() + 5
    while resources() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return resources()


@ranks(2)
def test_init_twice_is_init_once():
    before = resources()
    fw.init()
    fw.init()
    assert resources() == before
    assert (fw.rank(), fw.size()) == (int(os.environ["RANK"]), 2)
    return fw.allreduce(torch.full((3,), float(fw.rank())), name="after two inits")


@ranks(3)
def test_the_numbers_of_ranks():
    me = int(os.environ["RANK"])
    assert fw.is_initialized()
    assert (fw.rank(), fw.size()) == (me, 3)
    assert (fw.local_rank(), fw.local_size()) == (me, 3)
    assert (fw.cross_rank(), fw.cross_size()) == (0, 1)


@ranks(3, fresh=True, timeout=60)
def test_cycles_of_shutdown_and_init_with_work_leak_nothing():
    """No thread, no file descriptor, no segment."""

    def cycle(number):
        fw.init()
        for i in range(5):
            x = torch.full((1000 * i + 1,), float(fw.rank() + number))
            assert fw.allreduce(x, op=fw.Sum, name=f"cycle.{i}")[0] == 3 + 3 * number
            assert fw.allreduce(x, op=fw.Sum)[0] == 3 + 3 * number  # unnamed
        fw.add_process_set(fw.ProcessSet([0, 1]))
        big = torch.ones(600_000)
        fw.allreduce_(big, name="big")
        fw.shutdown()
        assert not fw.is_initialized()

    fw.shutdown()
    cycle(0)
    time.sleep(0.5)  # the first cycle's threads have left the kernel's list
    before = resources()
    for number in range(1, 6):
        cycle(number)
        assert settled(before) == before, f"after cycle {number}"
    fw.init()


@ranks(2, fresh=True)
def test_operations_after_shutdown_are_not_initialized_errors():
    handle = fw.allreduce_async(torch.ones(2), name="last")
    handle.wait()
    fw.barrier()
    fw.shutdown()
    fw.shutdown()  # idempotent
    check_not_initialized()
    assert handle.wait().tolist() == [1.0, 1.0]  # what was done stays done
    fw.init()
    return fw.allreduce(torch.ones(2), name="first")


def check_not_initialized():
    assert not fw.is_initialized()
    parameter = torch.nn.Parameter(torch.ones(2))
    for call in (
        fw.rank,
        fw.size,
        fw.local_rank,
        fw.local_size,
        fw.barrier,
        lambda: fw.allreduce(torch.ones(2), name="x"),
        lambda: fw.allreduce_async_(torch.ones(2), name="x"),
        lambda: fw.grouped_allreduce([torch.ones(2)], name="x"),
        lambda: fw.broadcast(torch.ones(2), root_rank=0, name="x"),
        lambda: fw.broadcast_object(1, root_rank=0),
        lambda: fw.broadcast_parameters({"p": parameter}, root_rank=0),
    ):
        error = error_of(call)
        assert type(error) is fw.NotInitializedError, repr(error)
        assert "init" in str(error)


def before_init():
    check_not_initialized()
    note(checked=True)


def test_operations_before_init_are_not_initialized_errors(launcher):
    (end,) = launcher.run(before_init, 1)
    assert end.code == 0, end.errors
    assert end.note("checked")


@ranks(3, fresh=True)
def test_operations_pending_at_shutdown_are_errors_not_hangs():
    if fw.rank() == 0:
        handles = [fw.allreduce_async(torch.ones(4), name=f"never.{i}") for i in range(3)]
        waiter = Waiter(fw.allreduce_async(torch.ones(4), name="waited for"))
        time.sleep(0.2)
        fw.shutdown()
        errors = [error_of(handle.wait) for handle in handles] + [waiter.error()]
        for error in errors:
            assert type(error) is fw.ShutdownError, repr(error)
    else:
        time.sleep(0.5)
        fw.shutdown()


class Waiter(threading.Thread):
    """Waits for a handle in a thread of its own."""

    def __init__(self, handle):
        super().__init__()
        self.handle, self.caught = handle, None
        self.start()

    def run(self):
        try:
            self.handle.wait()
        except Exception as error:
            self.caught = error

    def error(self):
        self.join(10)
        assert not self.is_alive(), "the wait did not end"
        return self.caught


@ranks(2, fresh=True)
def test_an_optimizer_is_wrapped_again_after_shutdown_and_init():
    """Until then its backward says that the engine it belongs to is gone."""
    model = torch.nn.Linear(3, 2)
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for turn in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), float(fw.rank() + turn))).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2, 3), turn + 0.5))
        optimizer.step()
        fw.shutdown()
        optimizer.zero_grad()
        error = error_of(model(torch.ones(1, 3)).sum().backward)
        assert type(error) is fw.ShutdownError, repr(error)
        fw.init()
        assert fw.DistributedOptimizer(optimizer, model.named_parameters()) is optimizer
    return [model.weight, model.bias]


@ranks(2, fresh=True)
def test_bad_configuration_is_a_value_error_at_init():
    """Naming the variable, the value and what is allowed; a later init works."""
    fw.shutdown()
    for keyword, value in (("cache_capacity", -5), ("stall_check_time", "soon"), ("fusion_threshold", 1.5)):
        with pytest.raises(ValueError, match=keyword) as caught:
            fw.init(**{keyword: value})
        assert str(value) in str(caught.value)
        assert "allowed" in str(caught.value)
    with pytest.raises((ValueError, TypeError), match="no_such_option"):
        fw.init(no_such_option=1)
    for variable in ("FUSEWIRE_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY"):
        os.environ[variable] = "many"
        try:
            with pytest.raises(ValueError, match=f"{variable}.*many"):
                fw.init()
        finally:
            del os.environ[variable]
    assert not fw.is_initialized()
    fw.init()
    return fw.allreduce(torch.ones(2), name="configured")


@ranks(1)
def test_one_rank_gives_what_the_formula_for_n_ranks_gives():
    """Scale factors are applied, types are checked, results are new tensors."""
    x = torch.tensor([1.0, -2.0])
    for op in (fw.Sum, fw.Average, fw.Min, fw.Max, fw.Product):
        out = fw.allreduce(x, op=op, prescale_factor=2.0, postscale_factor=3.0, name="one")
        assert out.tolist() == [6.0, -12.0], op
        assert out.data_ptr() != x.data_ptr()
    assert x.tolist() == [1.0, -2.0]
    y = x.clone()
    assert fw.allreduce_(y, prescale_factor=0.5, name="one") is y
    assert y.tolist() == [0.5, -1.0]
    groups = fw.grouped_allreduce([x, y], op=fw.Sum, postscale_factor=2.0, name="one group")
    assert [t.tolist() for t in groups] == [[2.0, -4.0], [1.0, -2.0]]
    assert fw.allreduce(torch.tensor([7, -7]), op=fw.Sum, prescale_factor=0.5, name="one int").tolist() == [3, -3]
    assert fw.allreduce(torch.tensor([True]), op=fw.Max, name="one bool").item() is True
    with pytest.raises(TypeError):
        fw.allreduce(torch.tensor([True]), name="one bool")
    out = fw.broadcast(x, root_rank=0, name="one broadcast")
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()
    with pytest.raises(ValueError, match="root_rank"):
        fw.broadcast(x, root_rank=1, name="one broadcast")
    fine = torch.full((2,), 1 + 2.0**-20)
    assert fw.allreduce(fine, compression=fw.Compression.fp16, name="one narrow").tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"memory|overlap"):
        fw.allreduce_(torch.ones(1).expand(3), name="one overlap")
    fw.barrier()
    assert fw.broadcast_object({"a": 1}, root_rank=0) == {"a": 1}
    p = torch.nn.Parameter(torch.ones(2))
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), gradient_predivide_factor=4.0)
    p.sum().backward()
    assert p.grad.tolist() == [1.0, 1.0]


def start_alone():
    start = time.monotonic()
    try:
        fw.init()
    except Exception as error:
        note(type=type(error).__name__, text=str(error), after=time.monotonic() - start)
        raise


@pytest.mark.parametrize(("present", "missing"), [([0], "1-3"), ([0, 2], "1, 3"), ([3], "0")])
def test_a_launcher_says_four_ranks_but_not_all_come(launcher, present, missing):
    """An error that names who is missing, not silent singles."""
    with launcher.start(start_alone, 4, only=present, env={"FUSEWIRE_START_TIMEOUT": "2"}) as job:
        for end in job.wait(40):
            assert end.code == 1
            assert re.search(rf"ranks? {missing}( of 4|, which .* is missing)", end.note("text")), end.notes
            assert end.note("after") < 20


@ranks(2, fresh=True)
def test_process_sets_that_init_refuses_leave_nothing_behind():
    """Whether it is seen before the ranks are connected or after, a corrected call starts anew."""
    kept = fw.ProcessSet([1])
    for wrong in ([kept, [0, 9]], [kept, [0, 0]], [kept, kept], [kept, [fw.rank()]], [kept, fw.global_process_set]):
        fw.shutdown()
        error = error_of(fw.init, process_sets=wrong)
        assert isinstance(error, (ValueError, fw.FusewireError)), repr(error)
        assert not fw.is_initialized()
        assert kept.process_set_id is None
    both = fw.ProcessSet([0, 1])
    fw.init(process_sets=[kept, both])
    assert (kept.process_set_id, both.process_set_id) == (1, 2)
    return fw.allreduce(torch.ones(2), op=fw.Sum, process_set=both)
