"""Any program of collectives, process sets, joins and mismatches gives what the sequential model says."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from program_model import Mismatch, Operation, Program, dissenting, expected, programs

import fusewire as fw

CI = bool(os.environ.get("CI"))
EXAMPLES = 2000 if CI else 200


def submit(engine, operation: Operation, rank: int, sets):
    """Its handle, and its inputs (which it may have changed)."""
    tensors = operation.inputs(rank)
    common = {"name": operation.name, "process_set": sets[operation.members], "engine": engine}
    kind = operation.kind
    if kind == "barrier":
        return fw._core.barrier(engine, sets[operation.members].process_set_id, False), tensors
    if kind == "broadcast":
        call = fw.broadcast_async_ if operation.in_place else fw.broadcast_async
        return call(tensors[0], operation.root, **common), tensors
    if kind == "alltoall":
        return fw.alltoall_async(tensors[0], list(operation.splits[rank]), **common), tensors
    name = f"{'grouped_' if operation.tensors else ''}{kind}_async{'_' if operation.in_place else ''}"
    if kind != "allgather":
        common |= {"op": operation.op}
        common |= {"prescale_factor": operation.prescale, "postscale_factor": operation.postscale}
    return getattr(fw, name)(tensors if operation.tensors else tensors[0], **common), tensors


def results(handle) -> list[torch.Tensor]:
    result = handle.wait()
    if result is None:
        return []
    return list(result) if isinstance(result, (list, tuple)) else [result]


def settle(handle, operation: Operation, tensors, right):
    if right is Mismatch:
        with pytest.raises(fw.TensorMismatchError, match=operation.name):
            handle.wait()
        return
    if isinstance(right, type):
        with pytest.raises(right):
            handle.wait()
        return
    got = results(handle)
    assert len(got) == len(right), operation
    for mine, tensor in zip(got, right, strict=True):
        assert mine.shape == tensor.shape, operation
        assert torch.equal(mine.to(tensor.dtype), tensor), operation
    if operation.in_place and got:
        assert all(mine is given for mine, given in zip(got, tensors, strict=True))


def run_rank(engine, program: Program):
    rank = engine.rank
    everyone = tuple(range(program.size))
    sets = {everyone: fw.global_process_set}
    joined_last = []
    for epoch in program.epochs:
        for members in epoch.add:
            sets[members] = fw.add_process_set(list(members), engine=engine)
        pending = []
        last = epoch.batches[rank]
        for number, turn in enumerate(epoch.rounds[:last]):
            present = {r for r in everyone if epoch.batches[r] > number}
            for index in turn.orders[rank]:
                operation, dissent = turn.operations[index], turn.dissent[index]
                if rank not in operation.members:
                    continue
                dissenter, what = dissent or (None, "")
                meant = dissenting(operation, what) if rank == dissenter else operation
                # A dissenter that is alone in its opinion because nobody else is there is simply right.
                alone = dissenter in present and [m for m in operation.members if m in present] == [dissenter]
                right = expected(meant if alone else operation, rank, present, dissenter)
                pending.append((*submit(engine, meant, rank, sets), meant, right))
            if number == last - 1 and epoch.hasty[rank]:
                break
            wait_all(pending)
        joined_last.append(fw.join(engine=engine))
        wait_all(pending)
        for members in epoch.remove:
            assert fw.remove_process_set(sets.pop(members), engine=engine)
    return joined_last


def wait_all(pending):
    while pending:
        handle, tensors, operation, right = pending.pop()
        settle(handle, operation, tensors, right)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=CI,  # the same verdict for the same code
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
@pytest.mark.timeout(1800)
def test_any_program_gives_what_the_model_says(program):
    engines = fw._core.make_in_process_engines(program.size, program.knobs)

    def run(engine):
        try:
            return run_rank(engine, program)
        except BaseException as error:
            engine.shutdown(False, f"{type(error).__name__}: {error}")  # nobody waits for this rank
            raise

    with ThreadPoolExecutor(program.size) as threads:
        runs = [threads.submit(run, engine) for engine in engines]
    errors = [error for error in (r.exception() for r in runs) if error is not None]
    for engine in engines:
        engine.shutdown()
    if errors:
        # What a rank raised first, not what the others raised because it left.
        raise next((e for e in errors if not isinstance(e, fw.PeerLostError)), errors[0])
    last = [r.result() for r in runs]
    assert all(ranks == last[0] for ranks in last), "ranks disagree about who joined last"
    assert all(0 <= rank < program.size for rank in last[0])
