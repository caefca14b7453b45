"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy, Jaggi: arXiv 1905.13727)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from .base import StatefulCompressor, Wire


class PowerSGDCompressor(StatefulCompressor):
    """A gradient M of shape (m, n) travels as P of shape (m, rank) and Q of shape (n, rank); the result is P Q^T.

    One step of power iteration per gradient, starting from the last Q: P = M Q, combined over the ranks and made
    orthonormal; Q = M^T P, combined; what P Q^T misses of a rank's own M is kept and added to its next gradient (Note
    [Error feedback]). Tensors of more than two dimensions count as matrices of shape (first, all others). Those of
    fewer than two, and those that the two factors would not make smaller, travel as they are, together with P.

    All ranks compute P's orthonormal basis from the same bits, so they must run the same torch on like processors.

    Args:
        rank: columns of P and Q. Higher is closer and dearer.
        seed: of the first Q; the same on every rank.
    """

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be >= 1, got {rank}")
        self.rank, self.seed = rank, seed

    def compresses(self, tensor: torch.Tensor) -> bool:
        """Whether it travels as two factors. Depends on its shape and dtype only."""
        if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.numel() == 0:
            return False
        rows, columns = tensor.shape[0], tensor[0].numel()
        return (rows + columns) * self.rank < rows * columns

    def exchange(self, wire: Wire, names: Sequence[str | None], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        chosen = [index for index, tensor in enumerate(tensors) if self.compresses(tensor)]
        others = [index for index in range(len(tensors)) if index not in set(chosen)]
        matrices = [self._with_error(tensors[i], names[i]).view(len(tensors[i]), -1) for i in chosen]
        starts = [self._start(names[i], matrix) for i, matrix in zip(chosen, matrices, strict=True)]
        left = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
        reduced = wire.reduce([*left, *(tensors[i] for i in others)])
        bases = [torch.linalg.qr(p).Q.contiguous() for p in reduced[: len(chosen)]]
        right = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        combined = wire.reduce(right)
        results = list(tensors)
        for index, value in zip(others, reduced[len(chosen) :], strict=True):
            results[index] = value
        for index, matrix, basis, own, q, start in zip(chosen, matrices, bases, right, combined, starts, strict=True):
            tensor, name = tensors[index], names[index]
            results[index] = (basis @ q.T).to(tensor.dtype).view(tensor.shape)
            self._keep_error(name, matrix.sub_(basis @ own.T).view(-1))
            if name is not None:
                self._keep_if(torch.isfinite(q).all() & q.any(), name, "q", q, start)  # 0 is no start for an iteration
        return results

    def _start(self, name: str | None, matrix: torch.Tensor) -> torch.Tensor:
        shape = (matrix.shape[1], self.rank)
        q = self.state.get(name, {}).get("q") if name is not None else None
        if q is not None and q.shape == shape:
            return q.to(matrix)
        generator = torch.Generator("cpu").manual_seed(self.seed + zlib.crc32((name or "").encode()))
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(matrix)
