"""Train a small transformer on Python's own reference manual, byte by byte, on two ranks; then let it write.

    python examples/char_lm.py [--steps 400]      # starts two ranks itself
    fusewire run -n 4 examples/char_lm.py         # or under any launcher: torchrun, mpirun, srun

The text is the one behind help("if"), which every Python brings along. Gradients travel as bfloat16, to show how.
"""

from __future__ import annotations

import argparse
import os
import time
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusewire

CONTEXT = 64
BATCH = 16  # per rank
LAUNCHER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class CharLM(nn.Module):
    """A causal transformer over ASCII: (batch, time) codes to (batch, time, 128) logits."""

    def __init__(self, width: int = 128, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embed(codes) + self.position[:length]
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits

    @torch.no_grad()
    def write(self, prompt: str, length: int) -> str:
        codes = torch.tensor([list(prompt.encode("ascii"))])
        for _ in range(length):
            logits = self(codes[:, -CONTEXT:])[:, -1]
            codes = torch.cat([codes, torch.multinomial(F.softmax(logits / 0.7, dim=-1), 1)], dim=1)
        return bytes(codes[0].tolist()).decode("ascii")


def load() -> Tensor:
    """About 460,000 character codes below 128."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.tensor(list(text.encode("ascii", errors="ignore")))


def train(steps: int) -> list[float]:
    """One rank's work. Returns the mean loss over all ranks of each tenth of the steps."""
    fusewire.init()
    rank, size = fusewire.rank(), fusewire.size()
    torch.set_num_threads(1)
    text = load()
    share = len(text) // size
    mine = text[rank * share : (rank + 1) * share]  # each rank reads its own part of the manual

    model = CharLM()
    fusewire.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = fusewire.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        named_parameters=model.named_parameters(),
        compression=fusewire.Compression.bf16,
    )
    torch.manual_seed(rank)  # from here on the ranks draw different batches
    losses, total, begin = [], torch.zeros(1), time.monotonic()
    report = max(1, steps // 10)
    for step in range(1, steps + 1):
        starts = torch.randint(len(mine) - CONTEXT, (BATCH, 1))
        window = mine[starts + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the gradients are already the mean over the ranks
        optimizer.step()
        total += loss.detach()
        if step % report == 0:
            losses.append(fusewire.allreduce(total / report, name="loss").item())
            total.zero_()
            if rank == 0:
                print(f"step {step:4}: loss {losses[-1]:.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    if rank == 0:
        print("\n" + model.eval().write("The with statement", 300), flush=True)
    fusewire.shutdown()
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: 400, about a minute)")
    options = parser.parse_args()
    if any(variable in os.environ for variable in LAUNCHER_VARIABLES):
        train(options.steps)
    else:
        fusewire.run(train, n=2, args=(options.steps,))
