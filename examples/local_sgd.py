"""Average less often: four ways to train on four ranks, compared by loss, accuracy and bytes sent.

    python examples/local_sgd.py [--task digits] [--steps 240] [--plot local_sgd.png]   # starts four ranks itself
    fusewire run -n 4 examples/local_sgd.py                                             # or under any launcher

per-step      gradients are averaged in every step (DistributedOptimizer)
periodic      every rank trains alone, the models are averaged every 8 steps (PeriodicModelAverager)
post-local    per-step for the first quarter, then periodic (LocalSGD)
hierarchical  pairs of ranks average their models every 2 steps, all ranks every 8 (HierarchicalModelAverager)

The tasks are those of digits.py and char_lm.py beside this file. Needs scikit-learn, and matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import fusewire
from fusewire.averaging import average_parameters

PERIOD = 8
METHODS = ("per-step", "periodic", "post-local", "hierarchical")
COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e")
LAUNCHER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@dataclass
class Task:
    """What is learned: a model, an optimizer for it, this rank's batches, and data that nobody trains on."""

    model: nn.Module
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    draw: Callable[[], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]


def digits() -> Task:
    """Images of 8x8 pixels, ten classes; each rank has its own share of them."""
    from digits import load, make_model

    train_inputs, train_labels, test_inputs, test_labels = load()
    mine = slice(fusewire.rank(), None, fusewire.size())
    inputs, labels = train_inputs[mine], train_labels[mine]

    def draw() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(labels), (32,))
        return inputs[chosen], labels[chosen]

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return Task(make_model(), make_optimizer, draw, (test_inputs, test_labels))


def characters() -> Task:
    """The next character of Python's manual; each rank reads its own part, and nobody the last tenth."""
    from char_lm import CONTEXT, CharLM, load

    text = load()
    windows = torch.arange(CONTEXT + 1)
    length = len(text) * 9 // 10
    share = length // fusewire.size()
    mine = text[fusewire.rank() * share : (fusewire.rank() + 1) * share]

    def pairs(part: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = part[starts + windows]
        return window[:, :-1], window[:, 1:]

    def draw() -> tuple[Tensor, Tensor]:
        return pairs(mine, torch.randint(len(mine) - CONTEXT, (8, 1)))

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    held_out = pairs(text[length:], torch.arange(0, len(text) - length - CONTEXT - 1, 4 * CONTEXT)[:, None])
    return Task(CharLM(width=64, depth=1), make_optimizer, draw, held_out)


TASKS = {"digits": digits, "characters": characters}


class Training:
    """One model in one of the four ways. `step` returns what this rank sends for it, in bytes."""

    def __init__(self, method: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.method, self.warmup = method, steps // 4
        self.everyone = fusewire.size()
        self.group = 2 if self.everyone % 2 == 0 else self.everyone
        self.size = sum(parameter.nbytes for parameter in model.parameters())
        self.turn = 0
        named = list(model.named_parameters())
        if method == "per-step":
            self.optimizer = fusewire.DistributedOptimizer(optimizer, named_parameters=named)
        elif method == "periodic":
            self.optimizer = fusewire.PostLocalSGDOptimizer(optimizer, fusewire.PeriodicModelAverager(PERIOD))
        elif method == "post-local":
            self.optimizer = fusewire.LocalSGD(optimizer, PERIOD, self.warmup, named_parameters=named)
        else:
            averager = fusewire.HierarchicalModelAverager({2: self.group, PERIOD: self.everyone})
            self.optimizer = fusewire.PostLocalSGDOptimizer(optimizer, averager)

    def step(self) -> float:
        self.optimizer.step()
        turn, self.turn = self.turn, self.turn + 1
        if self.method == "per-step" or (self.method == "post-local" and turn < self.warmup):
            return self.sent_among(self.everyone)
        if (turn - (self.warmup if self.method == "post-local" else 0)) % PERIOD == 0:
            return self.sent_among(self.everyone)
        return self.sent_among(self.group) if self.method == "hierarchical" and turn % 2 == 0 else 0.0

    def sent_among(self, ranks: int) -> float:
        """What each rank of a ring sends to reduce a model's worth of numbers."""
        return 2 * (ranks - 1) / ranks * self.size


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def train(name: str, method: str, steps: int) -> dict[str, Any]:
    """One rank's part of one curve: mean loss over the ranks by step, bytes sent until then, accuracy at the end."""
    torch.manual_seed(0)
    task = TASKS[name]()
    model = copy.deepcopy(task.model)
    fusewire.broadcast_parameters(model.state_dict(), root_rank=0)
    training = Training(method, model, task.make_optimizer(model), steps)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, steps)
    torch.manual_seed(1 + fusewire.rank())  # from here on the ranks draw different batches
    losses, sent = torch.zeros(steps), []
    for step in range(steps):
        loss = loss_of(model, *task.draw())
        training.optimizer.zero_grad()
        loss.backward()
        sent.append(training.step())
        scheduler.step()
        losses[step] = loss.detach()
    average_parameters(model.parameters())  # the last steps may have been local ones
    inputs, labels = task.held_out
    with torch.no_grad():
        accuracy = (model(inputs).argmax(-1) == labels).float().mean().item()
    return {
        "task": name,
        "method": method,
        "losses": fusewire.allreduce(losses, name="losses").tolist(),
        "sent": list(accumulate(sent)),
        "accuracy": accuracy,
    }


def work(tasks: list[str], steps: int) -> list[dict[str, Any]]:
    fusewire.init()
    torch.set_num_threads(1)
    curves = []
    for name in tasks:
        for method in METHODS:
            curves.append(train(name, method, steps))
            if fusewire.rank() == 0:
                print(f"{name}, {method}: accuracy {100 * curves[-1]['accuracy']:.2f} %", flush=True)
    fusewire.shutdown()
    return curves


def smooth(values: list[float]) -> list[float]:
    """A running mean over the last eight."""
    return [sum(values[max(0, i - 7) : i + 1]) / len(values[max(0, i - 7) : i + 1]) for i in range(len(values))]


def report(curves: list[dict[str, Any]], ranks: int) -> None:
    table = Table(title=f"{ranks} ranks, {len(curves[0]['losses'])} steps, models averaged every {PERIOD}")
    for column in ("task", "method", "loss", "accuracy", "each rank sent", "part"):
        table.add_column(column, justify="left" if column in ("task", "method") else "right")
    most = {curve["task"]: curve["sent"][-1] for curve in curves if curve["method"] == METHODS[0]}
    for curve in curves:
        table.add_row(
            curve["task"],
            curve["method"],
            f"{smooth(curve['losses'])[-1]:.3f}",
            f"{100 * curve['accuracy']:.2f} %",
            f"{curve['sent'][-1] / 1e6:.1f} MB",
            f"{100 * curve['sent'][-1] / most[curve['task']]:.0f} %" if most[curve["task"]] else "-",
        )
    Console().print(table)


def draw_plot(curves: list[dict[str, Any]], ranks: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(curve["task"] for curve in curves))
    with pyplot.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            len(tasks), 2, figsize=(11, 3.8 * len(tasks)), layout="constrained", squeeze=False
        )
        for (left, right), task in zip(axes, tasks, strict=True):
            for curve in (curve for curve in curves if curve["task"] == task):
                losses = smooth(curve["losses"])
                style = {"color": COLOURS[METHODS.index(curve["method"])], "label": curve["method"], "linewidth": 1.6}
                left.plot(range(1, len(losses) + 1), losses, **style)
                right.plot([sent / 1e6 for sent in curve["sent"]], losses, **style)
            left.set_xlabel("steps")
            right.set_xlabel("MB sent by each rank")
            right.set_xscale("symlog", linthresh=1)
            for axis in (left, right):
                axis.set_title(task, loc="left")
                axis.set_ylabel("training loss, running mean of 8 steps")
                axis.grid(alpha=0.25)
        axes[0][0].legend(frameon=False)
        figure.suptitle(f"The same loss for fewer bytes: {ranks} ranks, models averaged every {PERIOD} steps")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
    print(f"wrote {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS, "both"], default="both")
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of each curve (default: 240)")
    parser.add_argument("--plot", type=Path, default=Path("local_sgd.png"), help="the picture (default: local_sgd.png)")
    options = parser.parse_args()
    tasks = list(TASKS) if options.task == "both" else [options.task]
    launched = any(variable in os.environ for variable in LAUNCHER_VARIABLES)
    if launched:
        curves = work(tasks, options.steps)
        first, ranks = os.environ.get("RANK", "0") == "0", int(os.environ.get("WORLD_SIZE", "4"))
    else:
        curves = fusewire.run(work, n=4, args=(tasks, options.steps))[0]
        first, ranks = True, 4
    if first:
        report(curves, ranks)
        draw_plot(curves, ranks, options.plot)


if __name__ == "__main__":
    main()
