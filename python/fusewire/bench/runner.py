"""Measures cases: starts the ranks, checks every contender's result, then times them in interleaved rounds."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from .cases import MPI_PEERS, NO_COMMUNICATION, UNWATCHED, Case, Contender
from .group import BenchError, Group, mpi_missing
from .peers import growth_limit
from .stats import median_interval, quantile

# Note [How a batch is timed]
# The unit of measurement is a batch: the runner names a start time a little ahead on the monotonic clock, which all
# processes of a host share, and each rank sleeps until then, does a few untimed iterations and then `iterations` timed
# ones back to back. The batch's sample is (last rank's end - first rank's start) / iterations: the slowest rank counts
# and no library's own barrier is inside. Back to back is how training uses a collective, and no rank can run ahead by
# more than one allreduce. Large cases have one or few iterations per batch, small ones up to MAX_ITERATIONS.
#
# One round is one batch of every contender, and each round starts with another contender, so that slow drift of the
# machine hits all alike. Whoever is not in its batch sleeps in a read on the runner's socket: MPI busy-waits only
# inside a call. Values are reset before each batch (untimed), so that repeated sums never overflow; the result of
# every contender was checked for exactness before its first batch.
START_DELAY_NS = 1_000_000
MAX_ITERATIONS = 100
BATCH_SECONDS = 0.02
SMALL_SECONDS = 0.002  # iterations shorter than this get WARM_UPS untimed ones in each batch, longer ones get one
WARM_UPS = 10
# Being watched costs less than a busy machine disturbs, so there it is the CPU time of the busiest rank that counts,
# all its threads together. A timeline is written ten times a second by a thread of its own: that must be in the batch.
WATCHED_SECONDS = 0.5
WATCHED_WARM_UP_SECONDS = 0.15


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds per case, and bounds on the number of rounds."""

    seconds: float
    least_rounds: int
    most_rounds: int
    idle_seconds: float


FULL = Effort(seconds=8.0, least_rounds=9, most_rounds=150, idle_seconds=5.0)
QUICK = Effort(seconds=0.8, least_rounds=3, most_rounds=20, idle_seconds=1.0)


@dataclass
class Measurement:
    """Samples of one contender in one case; milliseconds per iteration, for idle percent of a core per rank."""

    contender: Contender
    samples: list[float]
    iterations: int = 1
    # Training: this contender's samples minus those of no communication, round by round. Watched: minus unwatched.
    extra: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quantile(self.samples, 0.25), quantile(self.samples, 0.75)

    @property
    def extra_interval(self) -> tuple[float, float]:
        """95 % interval of the median extra cost."""
        return median_interval(self.extra)


@dataclass
class Result:
    case: Case
    measurements: list[Measurement]
    # Contenders that could not be measured, each with the reason.
    missing: dict[Contender, str] = field(default_factory=dict)

    def find(self, peer: str, variant: str | None = None) -> Measurement | None:
        """The peer's measurement; of its fastest variant when none is named."""
        hits = [m for m in self.measurements if m.contender.peer == peer and variant in (None, m.contender.variant)]
        return min(hits, key=lambda m: m.median, default=None)


class Watcher(Protocol):
    """Is told what happens, only between batches so that it disturbs none of them."""

    def starting(self, case: Case) -> None: ...

    def progress(self, case: Case, fraction: float, what: str) -> None: ...

    def finished(self, result: Result) -> None: ...


class Runner:
    """The rank processes of a benchmark and the versions and absences of its peers. A context manager."""

    def __init__(self, size: int, peers: set[str], effort: Effort) -> None:
        self.size, self.effort = size, effort
        self.wanted = peers
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._exits = ExitStack()
        self._groups: dict[bool, Group] = {}  # by "under mpirun"

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._exits.__exit__(*error)  # type: ignore[arg-type]

    def measure(self, cases: list[Case], watcher: Watcher) -> list[Result]:
        results = []
        for case in cases:
            watcher.starting(case)
            result = self._idle(case) if case.section == "idle" else self._compare(case, watcher)
            results.append(result)
            watcher.finished(result)
        return results

    def _open(self, peer: str) -> Group | None:
        """The group in which the peer is open, or None with the reason in self.missing."""
        if peer in self.missing:
            return None
        under_mpirun = peer in MPI_PEERS
        if peer in self.versions:
            return self._groups[under_mpirun]
        try:
            if under_mpirun and (reason := mpi_missing()):
                raise BenchError(reason)
            if under_mpirun not in self._groups:
                self._groups[under_mpirun] = self._exits.enter_context(Group(self.size, under_mpirun))
            self.versions[peer] = self._groups[under_mpirun].call("open", peer)[0]
        except BenchError as error:
            self.missing[peer] = str(error)
            return None
        return self._groups[under_mpirun]

    def _entrants(self, case: Case, result: Result) -> dict[Contender, Group]:
        entrants: dict[Contender, Group] = {}
        for contender in case.contenders:
            # The step without communication runs in the same processes as the libraries it is compared with.
            host = "gloo" if contender.peer == NO_COMMUNICATION else contender.peer
            if contender.peer != NO_COMMUNICATION and contender.peer not in self.wanted:
                continue
            group = self._open(host)
            if group is None:
                result.missing[contender] = self.missing[host]
            else:
                entrants[contender] = group
        return entrants

    def _compare(self, case: Case, watcher: Watcher) -> Result:
        result = Result(case, [])
        entrants = self._entrants(case, result)
        for group in set(entrants.values()):
            group.call("load", case)
        for contender, group in entrants.items():
            watcher.progress(case, 0, f"checking {contender.label}")
            self._check(case, contender, group)
        plans = {contender: self._plan(case, contender, group) for contender, group in entrants.items()}
        samples = self._rounds(case, entrants, plans, watcher)
        for contender in entrants:
            result.measurements.append(Measurement(contender, samples[contender], plans[contender][1]))
        base = result.find(NO_COMMUNICATION) or result.find("fusewire", UNWATCHED)
        if base is not None:
            for measurement in result.measurements:
                measurement.extra = [
                    mine - plain for mine, plain in zip(measurement.samples, base.samples, strict=True)
                ]
        return result

    def _check(self, case: Case, contender: Contender, group: Group) -> None:
        answers = group.call("check", contender)
        for rank, answer in enumerate(answers):
            if answer.error:
                raise BenchError(f"{case.id}: {contender.label} is wrong on rank {rank}: {answer.error}")
        if len({answer.fingerprint for answer in answers}) > 1:
            raise BenchError(f"{case.id}: {contender.label} left different weights on different ranks")

    def _plan(self, case: Case, contender: Contender, group: Group) -> tuple[int, int]:
        """(warm-ups, iterations) of a batch, from a first look at how long one takes."""
        if case.section == "training":
            seconds = min(self._batch(case, contender, group, 1, 1) for _ in range(2)) / 1e3
            return 0, max(1, round(0.1 / seconds))
        if case.section == "watched":
            seconds = min(self._batch(case, contender, group, 3, 10) for _ in range(3)) / 1e3
            return max(1, round(WATCHED_WARM_UP_SECONDS / seconds)), max(1, round(WATCHED_SECONDS / seconds))
        limit = growth_limit(case.dtype, self.size)
        seconds = min(self._batch(case, contender, group, 1, 1) for _ in range(3)) / 1e3
        warm_ups = WARM_UPS if seconds < SMALL_SECONDS else 1
        wanted = min(MAX_ITERATIONS, max(1, round(BATCH_SECONDS / seconds)))
        return warm_ups, max(1, min(wanted, limit - warm_ups))

    def _rounds(
        self,
        case: Case,
        entrants: dict[Contender, Group],
        plans: dict[Contender, tuple[int, int]],
        watcher: Watcher,
    ) -> dict[Contender, list[float]]:
        samples: dict[Contender, list[float]] = {contender: [] for contender in entrants}
        order = list(entrants)
        begin = time.monotonic()
        for round_number in range(self.effort.most_rounds):
            spent = (time.monotonic() - begin) / self.effort.seconds
            if spent >= 1 and round_number >= self.effort.least_rounds:
                break
            done = max(round_number / self.effort.most_rounds, min(spent, round_number / self.effort.least_rounds))
            watcher.progress(case, done, f"round {round_number + 1}")
            for contender in order:
                samples[contender].append(self._batch(case, contender, entrants[contender], *plans[contender]))
            order.append(order.pop(0))
        return samples

    def _batch(self, case: Case, contender: Contender, group: Group, warm_ups: int, iterations: int) -> float:
        """Milliseconds per iteration. See Note [How a batch is timed]."""
        group.call("prepare", contender)
        start = time.perf_counter_ns() + START_DELAY_NS
        spans = group.call("batch", contender, start, warm_ups, iterations)
        nanoseconds: int = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
        if case.section == "watched":
            nanoseconds = max(cpu for _, _, cpu in spans)
        return nanoseconds / iterations / 1e6

    def _idle(self, case: Case) -> Result:
        """CPU of ranks that have done one allreduce and now wait for nothing; fresh processes for each library."""
        result = Result(case, [])
        warm_up = Case("idle-warm-up", "", "allreduce", case.contenders, shapes=((1024,),))
        for contender in case.contenders:
            if contender.peer not in self.wanted:
                continue
            try:
                with Group(self.size) as group:
                    group.call("open", contender.peer)
                    group.call("load", warm_up)
                    group.call("check", contender)
                    result.measurements.append(Measurement(contender, group.call("idle", self.effort.idle_seconds)))
            except BenchError as error:
                result.missing[contender] = str(error)
        return result
