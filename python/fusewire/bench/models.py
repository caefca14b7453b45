"""The models of the training cases, small enough for one core and written out in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """A model, one rank's fixed batch, and the loss that joins them."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(model(self.inputs), self.targets)


def linear_stack(depth: int = 200, width: int = 64) -> nn.Module:
    """Many tiny gradients: the cost of a library's bookkeeping per tensor."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width))


class Transformer(nn.Module):
    """A causal byte-level transformer, pre-norm, (batch, time) -> (batch * time, bytes)."""

    def __init__(self, vocabulary: int = 256, width: int = 256, depth: int = 4, context: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(hidden, mask=self.mask, is_causal=True)))
        return logits.flatten(0, 1)


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 with the 3x3 stem that 32x32 images get; 11.2 million parameters in 62 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for stage in range(4):
        for block in range(2):
            width = 64 << stage
            layers.append(Residual(channels, width, stride=2 if block == 0 and stage > 0 else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def make_task(name: str, rank: int) -> Task:
    """The named task: the same weights on every rank, a different batch on each."""
    torch.manual_seed(1)
    if name == "linear200":
        model = linear_stack()
    elif name == "transformer":
        model = Transformer()
    elif name == "resnet18":
        model = resnet18()
    else:
        raise ValueError(f"no training model named {name!r}")
    data = torch.Generator().manual_seed(100 + rank)
    if name == "linear200":
        return Task(model, torch.randn(32, 64, generator=data), torch.randint(64, (32,), generator=data))
    if name == "transformer":
        tokens = torch.randint(256, (8, 65), generator=data)
        return Task(model, tokens[:, :-1].contiguous(), tokens[:, 1:].flatten())
    return Task(model, torch.randn(8, 3, 32, 32, generator=data), torch.randint(10, (8,), generator=data))
