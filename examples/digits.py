"""Classify scikit-learn's handwritten digits on two ranks.

    python examples/digits.py                     # starts two ranks itself
    fusewire run -n 4 examples/digits.py          # or under any launcher: torchrun, mpirun, srun
    python examples/digits.py --compression powersgd

Each rank trains on its own share of the data. The lines that matter are marked 1 to 4.
"""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fusewire

EPOCHS = 15
BATCH = 32  # per rank
COMPRESSIONS = {
    "none": fusewire.Compression.none,
    "fp16": fusewire.Compression.fp16,
    "bf16": fusewire.Compression.bf16,
    "int8": fusewire.Compression.int8(),
    "powersgd": fusewire.Compression.powersgd(rank=2),
    "topk": fusewire.Compression.topk(ratio=0.1),
}
LAUNCHER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8x8 as (train inputs, train labels, test inputs, test labels), a fifth of them for the test."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    held_out = len(labels) // 5
    return inputs[held_out:], labels[held_out:], inputs[:held_out], labels[:held_out]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def checksum(model: nn.Module) -> str:
    """Sixteen hex digits that change with any bit of any weight."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy(force=True).tobytes())
    return digest.hexdigest()[:16]


def train(compression: str = "none") -> tuple[float, str]:
    """One rank's work. Returns (accuracy on all test images, checksum of the weights)."""
    fusewire.init()  # 1. meet the other ranks
    rank, size = fusewire.rank(), fusewire.size()
    torch.set_num_threads(1)
    train_inputs, train_labels, test_inputs, test_labels = load()
    mine = slice(rank, None, size)  # 2. this rank's share of the images
    inputs, labels = train_inputs[mine], train_labels[mine]

    torch.manual_seed(rank)  # different on purpose: broadcast_parameters makes all ranks start equal
    model = make_model()
    fusewire.broadcast_parameters(model.state_dict(), root_rank=0)  # 3. everybody starts from rank 0's weights
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = fusewire.DistributedOptimizer(  # 4. average the gradients
        optimizer, named_parameters=model.named_parameters(), compression=COMPRESSIONS[compression]
    )

    steps = len(train_labels) // (BATCH * size)  # the same number on every rank, whatever its share
    for epoch in range(EPOCHS):
        shuffled = torch.randperm(len(labels))
        total = torch.zeros(1)
        for step in range(steps):
            batch = shuffled[step * BATCH : (step + 1) * BATCH]
            loss = F.cross_entropy(model(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # when this returns, every gradient is the mean over the ranks
            optimizer.step()
            total += loss.detach()
        mean_loss = fusewire.allreduce(total / steps, name="loss")
        if rank == 0 and epoch % 5 == 4:
            print(f"epoch {epoch + 1:2}: training loss {mean_loss.item():.4f}", flush=True)

    with torch.no_grad():  # each rank judges its share of the test images; the counts are summed
        right = (model(test_inputs[mine]).argmax(1) == test_labels[mine]).sum()
    accuracy = fusewire.allreduce(right, op=fusewire.Sum, name="right").item() / len(test_labels)
    if rank == 0:
        print(f"test accuracy {100 * accuracy:.2f} %", flush=True)
    fusewire.barrier()
    print(f"rank {rank} of {size}: weights {checksum(model)}", flush=True)
    fusewire.shutdown()
    return accuracy, checksum(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none", help="how gradients travel")
    chosen = parser.parse_args().compression
    if any(variable in os.environ for variable in LAUNCHER_VARIABLES):
        train(chosen)
    else:
        results = fusewire.run(train, n=2, args=[chosen])
        if len({weights for _, weights in results}) != 1:
            raise SystemExit("the ranks hold different weights")
