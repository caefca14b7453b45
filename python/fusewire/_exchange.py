"""Gradients that do not travel as they are: the Python side of Note [Apart] in csrc/torch/grad_reducer.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import _core
from .compressors import StatefulCompressor, Wire
from .process_sets import ProcessSet

# A sparse gradient whose rows, counted over all ranks, are more than this share of the parameter's rows travels
# densely: gathering it would move more bytes than summing the whole table. The result is sparse all the same.
DENSE_SHARE = 0.5

Item = tuple[str, torch.Tensor, torch.Tensor | None, bool]


class Exchange:
    """Combines the gradients of one optimizer that are compressed in Python, or sparse; at the end of a window.

    Called on every rank of the process set with the same parameters: (name, parameter, value, whether it is sparse),
    where the value is None on ranks that have none.
    """

    def __init__(
        self,
        compressor: StatefulCompressor | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> None:
        self.engine: _core.Engine | None = None
        self._compressor = compressor
        self._op, self._prescale, self._postscale, self._process_set = op, prescale, postscale, process_set

    def __call__(self, prefix: str, items: Sequence[Item]) -> list[torch.Tensor]:
        wire = Wire(self._op, self._prescale, self._postscale, self._process_set, self.engine, f"{prefix}/apart")
        found: dict[str, torch.Tensor] = {}
        dense = [(name, _or_zeros(parameter, value)) for name, parameter, value, sparse in items if not sparse]
        if dense:
            assert self._compressor is not None
            names, values = zip(*dense, strict=True)
            found |= zip(names, self._compressor.exchange(wire, names, values), strict=True)
        tables = [item for item in items if item[3]]
        if tables:
            names = tuple(name for name, *_ in tables)
            rows = [_rows(parameter, value) for _, parameter, value, _ in tables]
            found |= zip(names, combine_rows(wire, rows), strict=True)
        return [found[name] for name, *_ in items]


def combine_rows(wire: Wire, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The combined values of row-sparse tensors (COO, coalesced, one sparse dimension), of the same kind.

    Three operations, whatever the number of tensors: counts, thin tables, full ones.
    """
    counts = torch.zeros((wire.size, len(tables)), dtype=torch.int64, device="cpu")
    counts[wire.rank] = torch.tensor([table.indices().shape[1] for table in tables], device="cpu")
    (counts,) = wire.sum([counts])
    full = [int(total) > DENSE_SHARE * len(table) for total, table in zip(counts.sum(0), tables, strict=True)]
    thin_ones = [table for table, yes in zip(tables, full, strict=True) if not yes]
    gathered = wire.gather([part for table in thin_ones for part in (table.indices()[0], table.values())])
    thin = iter(zip(gathered[::2], gathered[1::2], strict=True))
    dense = iter(wire.reduce([_marked(table) for table, yes in zip(tables, full, strict=True) if yes]))
    return [
        _unmarked(next(dense), table) if yes else _joined(*next(thin), table, wire.factor)
        for table, yes in zip(tables, full, strict=True)
    ]


def _or_zeros(parameter: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(parameter) if value is None else value


def _rows(parameter: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """`value` as a coalesced tensor of rows; duplicates are added in a wide type."""
    if value is None:
        empty = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        return _coalesced(empty, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape)
    if value.layout != torch.sparse_coo or value.sparse_dim() != 1:
        value = value.to_dense().to_sparse(1)
    if value.is_coalesced():
        return value
    return _summed(value._indices(), value._values(), value, 1.0)


def _joined(indices: torch.Tensor, values: torch.Tensor, table: torch.Tensor, factor: float) -> torch.Tensor:
    return _summed(indices[None], values, table, factor)


def _summed(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, factor: float) -> torch.Tensor:
    wide = values.to(torch.promote_types(values.dtype, torch.float64)) * factor
    total = torch.sparse_coo_tensor(indices, wide, like.shape, check_invariants=False).coalesce()
    return _coalesced(total.indices(), total.values().to(like.dtype), like.shape)


def _coalesced(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)


def _marked(table: torch.Tensor) -> torch.Tensor:
    """A dense matrix of its rows, with one more column that says which rows there are."""
    values = table.values().reshape(table.indices().shape[1], -1)
    matrix = values.new_zeros((len(table), values.shape[1] + 1))
    rows = table.indices()[0]
    matrix[rows, :-1] = values
    matrix[rows, -1] = 1
    return matrix


def _unmarked(matrix: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    rows = matrix[:, -1].nonzero().view(-1)
    return _coalesced(rows[None], matrix[rows, :-1].reshape(-1, *table.shape[1:]), table.shape)
