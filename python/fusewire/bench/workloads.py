"""What one rank holds for the case that is being measured: buffers or models, and a callable per contender."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import importlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from .cases import ADASUM, NO_COMMUNICATION, STATS, TIMELINE, Case, Contender
from .models import make_task
from .peers import Buffers, Peer, Step


@dataclass(frozen=True)
class CheckResult:
    """``error`` is '' or a sentence; ``fingerprint`` must be the same on all ranks."""

    error: str = ""
    fingerprint: str = ""


class Workload(Protocol):
    def step(self, contender: Contender) -> Step:
        """A callable that does one iteration."""

    def prepare(self, contender: Contender) -> None:
        """Untimed work before a batch."""

    def check(self, contender: Contender) -> CheckResult:
        """Do the contender's work once or twice on known input and judge the result."""

    def close(self) -> None:
        """Undo what outlives the workload."""


class Reduction(Workload):
    """Allreduce (sum) of one tensor or a list, in place."""

    def __init__(self, case: Case, peers: dict[str, Peer], rank: int, size: int) -> None:
        self.buffers = Buffers(case)
        self.rank, self.size = rank, size
        self.steps = {c: peers[c.peer].step(c.variant, self.buffers) for c in case.contenders if c.peer in peers}

    def step(self, contender: Contender) -> Step:
        return self.steps[contender]

    def prepare(self, contender: Contender) -> None:
        self.buffers.reset()

    def check(self, contender: Contender) -> CheckResult:
        step = self.steps[contender]
        if contender.variant == ADASUM:
            self.buffers.tensors[0].fill_(3)  # of equal vectors it is the vector
            step()
            return CheckResult("" if bool((self.buffers.tensors[0] == 3).all()) else "Adasum changed equal vectors")
        if contender.peer == "memcpy":
            step()
            first, last = self.buffers.source.view(-1)[[0, -1]], self.buffers.flat[[0, -1]]
            return CheckResult("" if torch.equal(first, last) else "memcpy did not copy")
        self.buffers.fill_pattern(self.rank)
        step()
        return CheckResult(self.buffers.check_pattern(self.size))


class Collective(Workload):
    """One of the other collectives on one tensor. Every call makes its result, as they do for a user; broadcast works
    in place."""

    def __init__(self, case: Case, peers: dict[str, Peer], rank: int, size: int) -> None:
        self.case, self.rank, self.size = case, rank, size
        count = case.shapes[0][0]
        self.everybody = [torch.arange(count, dtype=torch.float32).remainder_(97).add_(r) for r in range(size)]
        self.tensor = self.everybody[rank].clone()
        self.steps = {
            c: peers[c.peer].collective(case.operation, self.tensor, size) for c in case.contenders if c.peer in peers
        }

    def step(self, contender: Contender) -> Step:
        return self.steps[contender]

    def prepare(self, contender: Contender) -> None:
        pass

    def check(self, contender: Contender) -> CheckResult:
        self.tensor.copy_(self.everybody[self.rank])
        result = self.steps[contender]()
        result = self.tensor if self.case.operation == "broadcast" else result
        right = torch.equal(result, self._expected())
        return CheckResult("" if right else f"{self.case.operation} gives a wrong result")

    def _expected(self) -> torch.Tensor:
        if self.case.operation == "allgather":
            return torch.cat(self.everybody)
        if self.case.operation == "broadcast":
            return self.everybody[0]
        if self.case.operation == "alltoall":
            return torch.cat([tensor.chunk(self.size)[self.rank] for tensor in self.everybody])
        return torch.stack(self.everybody).sum(0).chunk(self.size)[self.rank]


class Training(Workload):
    """Forward, backward and SGD step on this rank's own batch, on one copy of the model per contender."""

    def __init__(self, case: Case, peers: dict[str, Peer], rank: int, size: int) -> None:
        self.task = make_task(case.model, rank)
        self.models: dict[Contender, torch.nn.Module] = {}
        self.steps: dict[Contender, Step] = {}
        for contender in case.contenders:
            if contender.peer in peers or contender.peer == NO_COMMUNICATION:
                self._add(contender)

    def _add(self, contender: Contender) -> None:
        model = copy.deepcopy(self.task.model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        forward: torch.nn.Module = model
        if contender.peer == "ddp":
            forward = torch.nn.parallel.DistributedDataParallel(model)
        elif contender.peer == "fusewire":
            fw = importlib.import_module("fusewire")
            fw.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = fw.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

        def step() -> None:
            optimizer.zero_grad()
            self.task.loss(forward).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        self.models[contender], self.steps[contender] = model, step

    def step(self, contender: Contender) -> Step:
        return self.steps[contender]

    def prepare(self, contender: Contender) -> None:
        pass

    def check(self, contender: Contender) -> CheckResult:
        """Two steps; then all ranks must hold the same weights, and fusewire those that DDP holds."""
        for _ in range(2):
            self.steps[contender]()
        if contender.peer == NO_COMMUNICATION:
            return CheckResult()
        weights = self._weights(contender)
        fingerprint = hashlib.sha256(ctypes.string_at(weights.data_ptr(), weights.nbytes)).hexdigest()
        other = next((c for c in self.models if c.peer == "ddp" and c != contender), None)
        if other is not None and not torch.allclose(weights, self._weights(other), rtol=1e-4, atol=1e-6):
            worst = float((weights - self._weights(other)).abs().max())
            return CheckResult(f"weights differ from DDP's by up to {worst:.3g} after two steps", fingerprint)
        return CheckResult("", fingerprint)

    def _weights(self, contender: Contender) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.models[contender].parameters()])


class Watched(Workload):
    """The same step in the same memory for all contenders: with the timeline on, with stats() called in it, and with
    neither."""

    def __init__(self, case: Case, peers: dict[str, Peer], rank: int, size: int) -> None:
        self.fusewire = importlib.import_module("fusewire")
        self.folder = tempfile.TemporaryDirectory(prefix="fusewire-bench-")
        self.recording = False
        self.training: Training | None = None
        if case.model:
            plain = Contender("fusewire")
            self.training = Training(replace(case, contenders=(plain,)), peers, rank, size)
            self.plain = self.training.step(plain)
        else:
            self.plain = self._allreduce(torch.ones(case.shapes[0]), f"bench.{case.id}")

    def _allreduce(self, tensor: torch.Tensor, name: str) -> Step:
        allreduce = self.fusewire.allreduce_  # averages, so it may be repeated for ever
        return lambda: allreduce(tensor, name=name)

    def step(self, contender: Contender) -> Step:
        if contender.variant != STATS:
            return self.plain
        step, stats = self.plain, self.fusewire.stats

        def asking() -> None:
            step()
            stats()

        return asking

    def prepare(self, contender: Contender) -> None:
        if self.recording:
            self.fusewire.stop_timeline()
        self.recording = contender.variant == TIMELINE
        if self.recording:
            self.fusewire.start_timeline(str(Path(self.folder.name) / "timeline.json"))

    def check(self, contender: Contender) -> CheckResult:
        """The numbers are judged in the sections that measure them; here, that the watcher has seen the steps."""
        before = self.fusewire.stats().units
        self.prepare(contender)
        self.step(contender)()
        self.close()
        files = list(Path(self.folder.name).iterdir())
        if self.fusewire.stats().units == before:
            return CheckResult("stats() does not count")
        if bool(files) != (contender.variant == TIMELINE) or any('"allreduce"' not in f.read_text() for f in files):
            return CheckResult("the timeline does not have the step")
        for file in files:
            file.unlink()
        return CheckResult() if self.training is None else self.training.check(Contender("fusewire"))

    def close(self) -> None:
        if self.recording:
            self.fusewire.stop_timeline()
            self.recording = False


def make_workload(case: Case, peers: dict[str, Peer], rank: int, size: int) -> Workload:
    kinds: dict[str, type[Workload]] = {"training": Training, "collective": Collective, "watched": Watched}
    kind = kinds.get(case.section, Reduction)
    return kind(case, peers, rank, size)  # type: ignore[call-arg]
