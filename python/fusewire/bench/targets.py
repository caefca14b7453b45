"""The speed that Fusewire sets itself, as ratios to what the peers reach in the same run (``--bars``)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from .cases import ADASUM, ASYNC, COLLECTIVE_SIZES, COLLECTIVES, GROUPED, SUM, UNWATCHED, Contender
from .runner import Measurement, Result


@dataclass(frozen=True)
class Bar:
    """``text`` as a table shows it, ``value`` reached and the ``limit`` it must not pass, both None if unmeasured."""

    text: str
    value: float | None
    limit: float | None

    @property
    def verdict(self) -> str:
        if self.value is None or self.limit is None:
            return "not measured"
        return "pass" if self.value <= self.limit else "FAIL"


@dataclass(frozen=True)
class Rule:
    """At most ``factor`` times the median of ``peer`` (and variant, if one is named), of the faster one where several
    are named ("gloo|mpi"); or at most ``factor`` ms (percent for idle) if ``peer`` is ''."""

    factor: float
    peer: str = ""
    variant: str | None = None

    def judge(self, result: Result, mine: Measurement) -> Bar:
        unit = "%" if result.case.section == "idle" else "ms"
        if not self.peer:
            value = max(mine.samples) if result.case.section == "idle" else mine.median
            return Bar(f"{self.factor:g} {unit}", value, self.factor)
        found = [result.find(peer, self.variant) for peer in self.peer.split("|")]
        theirs = min(filter(None, found), key=lambda measurement: measurement.median, default=None)
        text = f"{self.factor:g}x {self.variant or self.peer}"
        return Bar(text, mine.median, self.factor * theirs.median) if theirs else Bar(text, None, None)


def extra_bar(result: Result, mine: Measurement, factor: float = 0.5) -> Bar:
    """At most ``factor`` times what DDP adds to a step without communication."""
    text, ddp = f"{factor:g}x DDP's extra", result.find("ddp")
    if ddp is None or not ddp.extra or not mine.extra:
        return Bar(text, None, None)
    return Bar(text, median(mine.extra), factor * median(ddp.extra))


def watched_bar(result: Result, mine: Measurement, percent: float = 1.0) -> Bar:
    """At most so much more than the step takes that nobody watches."""
    base = result.find("fusewire", UNWATCHED)
    text = f"{percent:g} % of {UNWATCHED}"
    return Bar(text, median(mine.extra), percent / 100 * base.median) if base and mine.extra else Bar(text, None, None)


# By case, for two ranks on two cores; and for four ranks on two cores.
TWO_RANKS: dict[str, tuple[Rule, ...]] = {
    "allreduce-float32-4B": (Rule(0.2, "gloo"), Rule(0.03)),
    "allreduce-float32-1KB": (Rule(0.2, "gloo"), Rule(0.03)),
    "allreduce-float32-64KB": (Rule(0.2, "gloo"), Rule(0.03)),
    "allreduce-float32-1MB": (Rule(1.0, "mpi"),),
    "allreduce-float32-16MB": (Rule(0.75, "mpi"),),
    "allreduce-float32-64MB": (Rule(0.2, "gloo"), Rule(0.333, "mpi"), Rule(1.5, "memcpy")),
    "allreduce-float16-16MB": (Rule(0.2, "gloo"),),
    "allreduce-bfloat16-16MB": (Rule(0.25, "gloo"),),
    "list-resnet50": (Rule(0.2, "gloo"), Rule(1.0, "mpi")),
    "list-gpt2": (Rule(0.5, "mpi"),),
    "idle": (Rule(0.5),),
}
for _operation in COLLECTIVES:
    for _size in COLLECTIVE_SIZES:
        TWO_RANKS[f"{_operation}-{_size.replace(' ', '')}"] = (Rule(2.0 if _size == "64 KB" else 1.0, "gloo|mpi"),)
FOUR_RANKS: dict[str, tuple[Rule, ...]] = {  # the milliseconds are Horovod's over MPI, on two cores
    "allreduce-float32-4B": (Rule(0.5, "gloo"), Rule(1.6)),
    "allreduce-float32-1MB": (Rule(0.5, "gloo"), Rule(1.7)),
    "allreduce-float32-64MB": (Rule(0.5, "gloo"), Rule(0.6, "mpi"), Rule(90)),
    "list-resnet50": (Rule(0.5, "gloo"), Rule(222)),
    "idle": (Rule(0.5),),
}
BY_VARIANT = {ASYNC: Rule(4.0), GROUPED: Rule(2.0)}  # the list of 1,000 tensors of 1,000 floats, two ranks


def bars(result: Result, contender: Contender, size: int) -> list[Bar]:
    """What Fusewire's ``contender`` has to reach in this case; empty where no bar is set."""
    mine = result.find(contender.peer, contender.variant)
    if mine is None or contender.peer != "fusewire":
        return []
    if result.case.section == "training":
        return [extra_bar(result, mine)]
    if result.case.section == "watched":
        return [watched_bar(result, mine)] if result.case.model and contender.variant != UNWATCHED else []
    if result.case.section == "adasum":
        return [Rule(3.0, "fusewire", SUM).judge(result, mine)] if contender.variant == ADASUM else []
    if result.case.id == "list-1000x1000" and size == 2:
        return [BY_VARIANT[contender.variant].judge(result, mine)]
    table = TWO_RANKS if size <= 2 else FOUR_RANKS
    return [rule.judge(result, mine) for rule in table.get(result.case.id, ())]
