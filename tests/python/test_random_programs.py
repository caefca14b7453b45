"""Random programs of operations, process sets, joins and mismatches, on ranks that are threads, against a sequential
model of what each operation means.

FUSEWIRE_EXAMPLES says how many programs are tried: by default 2,000 in CI, fewer elsewhere.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusewire as fw

EXAMPLES = int(os.environ.get("FUSEWIRE_EXAMPLES", "2000" if os.environ.get("CI") else "150"))
REDUCTIONS = {
    fw.Sum: lambda values, size: sum(values),
    fw.Average: lambda values, size: sum(values) / size,
    fw.Min: lambda values, size: torch.stack(values).min(0).values,
    fw.Max: lambda values, size: torch.stack(values).max(0).values,
}
KINDS = ("allreduce", "grouped_allreduce", "allgather", "alltoall", "reducescatter", "broadcast", "mismatch")


@dataclass(frozen=True)
class Step:
    """One operation of all members of a set, but for those that have joined by then."""

    number: int
    kind: str
    ranks: tuple[int, ...]  # the members of its set
    place: int  # of the set among the sets
    op: fw.ReduceOp
    odd: int  # a member: the root of a broadcast, the one who is different in a mismatch

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.number}"

    def rows(self, rank: int) -> int:
        return random.Random(f"{self.number}.{rank}").choice([0, 1, 2, 5, 900])

    def splits(self, rank: int) -> list[int]:
        dice = random.Random(f"splits.{self.number}.{rank}")
        return [dice.choice([0, 1, 3, 400]) for _ in self.ranks]

    def value(self, rank: int) -> torch.Tensor:
        """What a member brings: whole numbers, so that no order of additions matters."""
        same = 3 + 7 * (self.number % 3) * (1 if self.number % 5 else 300)
        rows = {"allgather": self.rows(rank), "alltoall": sum(self.splits(rank))}.get(self.kind, same)
        if self.kind == "mismatch" and rank == self.odd:
            rows += 1
        values = torch.arange(rows * 2, dtype=torch.float64).reshape(rows, 2)
        return values.remainder_(11).add_(rank + self.number)

    def submit(self, rank: int, process_set: fw.ProcessSet, engine: object) -> fw.Handle:
        common = {"name": self.name, "process_set": process_set, "engine": engine}
        value = self.value(rank)
        if self.kind == "allgather":
            return fw.allgather_async(value, **common)
        if self.kind == "alltoall":
            return fw.alltoall_async(value, self.splits(rank), **common)
        if self.kind == "reducescatter":
            return fw.reducescatter_async(value, op=self.op, **common)
        if self.kind == "broadcast":
            return fw.broadcast_async(value, self.odd, **common)
        if self.kind == "grouped_allreduce":
            return fw.grouped_allreduce_async([value, value[:1] * 2], op=self.op, **common)
        return fw.allreduce_async(value, op=self.op, **common)

    def expected(self, rank: int, there: list[int]) -> list[torch.Tensor] | type[Exception]:
        """What `rank` gets when the ranks `there` take part and the set's other members have joined."""
        place = self.ranks.index(rank)
        values = [self.value(r) for r in there]
        if self.kind == "mismatch" and self.odd in there and len(there) > 1:
            return fw.TensorMismatchError
        if self.kind == "broadcast":
            return [self.value(self.odd)] if self.odd in there else ValueError
        if self.kind == "allgather":
            return [torch.cat(values)]
        if self.kind == "alltoall":
            parts = {r: self.value(r).split(self.splits(r))[place] for r in there}
            received = torch.tensor([len(parts[r]) if r in parts else 0 for r in self.ranks], dtype=torch.int32)
            return [torch.cat(list(parts.values())), received]
        total = REDUCTIONS[self.op](values, len(self.ranks))
        if self.kind == "reducescatter":
            each, more = divmod(len(total), len(self.ranks))
            start = place * each + min(place, more)
            return [total[start : start + each + (place < more)]]
        if self.kind == "grouped_allreduce":
            return [total, REDUCTIONS[self.op]([value[:1] * 2 for value in values], len(self.ranks))]
        return [total]


@dataclass(frozen=True)
class Program:
    size: int
    sets: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]
    ends: tuple[int, ...]  # how many of the steps each rank takes part in, before it joins
    seed: int

    def there(self, step: Step) -> list[int]:
        return [rank for rank in step.ranks if step.number < self.ends[rank]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    size = draw(st.integers(1, 5))
    everybody = tuple(range(size))
    subsets = st.lists(st.sampled_from(everybody), min_size=1, unique=True).map(lambda ranks: tuple(sorted(ranks)))
    sets = (everybody, *draw(st.lists(subsets, max_size=3)))
    steps = []
    for number in range(draw(st.integers(1, 12))):
        place = draw(st.integers(0, len(sets) - 1))
        op, odd = draw(st.sampled_from(list(REDUCTIONS))), draw(st.sampled_from(sets[place]))
        steps.append(Step(number, draw(st.sampled_from(KINDS)), sets[place], place, op, odd))
    ends = tuple(draw(st.sampled_from([len(steps), len(steps), number])) for number in range(size))
    return Program(size, sets, tuple(steps), ends, draw(st.integers(0, 1 << 20)))


def run(program: Program, rank: int, engine: object) -> None:
    """The whole program on one rank, twice: everybody is back after the join."""
    sets = [fw.global_process_set] + [fw.add_process_set(list(ranks), engine=engine) for ranks in program.sets[1:]]
    for turn in range(2):
        mine = [step for step in program.steps if rank in program.there(step)]
        random.Random(f"{program.seed}.{rank}.{turn}").shuffle(mine)
        handles = [(step, attempt(lambda s=step: s.submit(rank, sets[s.place], engine))) for step in mine]
        last = fw.join(engine=engine)
        assert 0 <= last < program.size
        for step, handle in handles:
            compare(step, handle, step.expected(rank, program.there(step)))
    for made in sets[1:]:
        assert fw.remove_process_set(made, engine=engine)


def attempt(call):
    try:
        return call()
    except Exception as error:
        return error


def compare(step: Step, handle, expected) -> None:
    result = attempt(handle.wait) if isinstance(handle, fw.Handle) else handle
    if isinstance(expected, type):
        assert isinstance(result, expected), (step, result)
        return
    assert not isinstance(result, Exception), (step, result)
    results = list(result) if isinstance(result, (list, tuple)) else [result]
    assert len(results) == len(expected), step
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got, wanted), (step, got, wanted)


@pytest.mark.timeout(1200)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(programs())
def test_any_program_gives_what_the_model_says(program):
    engines = fw._core.make_in_process_engines(program.size, {"stall_abort_time": "20"})
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            run(program, rank, engines[rank])
        except BaseException as error:
            failures.append(error)
            engines[rank].shutdown(False, f"the test failed: {error}")

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(program.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.shutdown()
    if failures:
        raise failures[0]
