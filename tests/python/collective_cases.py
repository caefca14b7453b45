"""Inputs for tests of the collectives, which every rank can make for all of them. Imported on the ranks, too."""

import torch

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def numbers(rank: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """What `rank` contributes: every rank can make it."""
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randint(0, 100, shape, generator=generator)
    return values.to(torch.int64).to(dtype) if dtype != torch.bool else values % 2 == 0


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.stack([t, t], dim=2)[:, :, 0],
    "expanded": lambda t: t[:1].expand(*t.shape),
    "reversed columns of a wider one": lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]],
    "conjugated": lambda t: t.to(torch.complex64).mul(1j).conj(),
    "negated": lambda t: torch.view_as_complex(torch.stack([t, t], dim=2)).conj().imag,
}


def weight(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss's weights, another one on every rank."""
    return (torch.arange(tensor.numel(), dtype=tensor.dtype) * (rank + 1) + rank).reshape(tensor.shape)
