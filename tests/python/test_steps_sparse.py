"""Sparse gradients in training: as the dense ones of the whole batch, and sparse still."""

import pytest
import torch
from rank_helpers import close, ranks

import fusewire as fw

ROWS = 40


class Words(torch.nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(ROWS, 3, padding_idx=0, sparse=sparse)
        self.other = torch.nn.EmbeddingBag(ROWS, 2, mode="sum", sparse=sparse)
        self.rest = torch.nn.Linear(3, 2)
        self.double()

    def loss(self, rows, scale):
        """Only what `rows` names is used: None leaves the table out, a list looks its rows up."""
        result = self.rest(torch.ones(2, 3, dtype=torch.float64)).pow(2).sum() * scale
        if rows is not None:
            result = result + self.rest(self.table(torch.tensor(rows))).pow(2).sum() * scale
            result = result + self.other(torch.tensor([rows])).pow(2).sum() * scale
        return result


# What the ranks look up, turn by turn: duplicates, padding only, nothing, everything.
TURNS = [
    ([1, 2, 2, 9], [0, 0], [2]),
    ([3], None, [5, 5]),
    (None, [0], None),
    (None, None, None),
    ([*range(ROWS)], [*range(ROWS)], [1]),
    ([7, 1], [7, 1, 7], None),
]

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@ranks(2, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"sparse_as_dense": True}, {"op": "Sum"}], ids=str)
def test_embeddings_with_sparse_gradients(kind, options):
    model, dense = Words(True), Words(False)
    op = getattr(fw, options.get("op", "Average"))
    options = options | {"op": op}
    optimizer = fw.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), **options)
    plain = OPTIMIZERS[kind](dense.parameters())
    share = fw.size() if op == fw.Average else 1
    for turn in TURNS * 2:
        optimizer.zero_grad()
        plain.zero_grad()
        model.loss(turn[fw.rank()], fw.rank() + 1).backward()
        sum(dense.loss(turn[r], r + 1) / share for r in range(fw.size())).backward()
        for (name, p), right in zip(model.named_parameters(), dense.parameters(), strict=True):
            if right.grad is None:
                assert p.grad is None or not p.grad.to_dense().any(), name
                continue
            sparse = name != "rest.weight" and name != "rest.bias" and not options.get("sparse_as_dense")
            assert p.grad.is_sparse == sparse, name
            close(p.grad.to_dense(), right.grad, 1e-12)
        optimizer.step()
        plain.step()
        for p, right in zip(model.parameters(), dense.parameters(), strict=True):
            close(p, right, 1e-12)
    return [p.detach() for p in model.parameters()]


@ranks(3)
def test_sparse_adam():
    """It takes no dense gradient at all, and moves the rows that some rank has used, no others."""
    torch.manual_seed(1)
    table, alone = (torch.nn.Embedding(ROWS, 3, sparse=True) for _ in range(2))
    alone.load_state_dict(table.state_dict())
    optimizer = fw.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
    plain = torch.optim.SparseAdam(alone.parameters(), lr=0.1)
    for turn in TURNS * 2:
        optimizer.zero_grad()
        plain.zero_grad()
        if turn[fw.rank()]:
            table(torch.tensor(turn[fw.rank()])).pow(2).sum().backward()
        if any(turn):
            sum(alone(torch.tensor(rows)).pow(2).sum() for rows in turn if rows).div(3).backward()
            optimizer.step()
            plain.step()
        assert table.weight.grad is None or table.weight.grad.is_sparse
        close(table.weight, alone.weight, 1e-5)
    return table.weight


@ranks(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dense_travel", [False, True])
def test_a_gradient_is_coalesced_and_rounded_once(dtype, dense_travel):
    """Duplicates are added in a wide type, however the rows travel."""
    table = torch.nn.Parameter(torch.zeros(ROWS, 2, dtype=dtype))
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), op=fw.Sum)
    rows = torch.arange(ROWS if dense_travel else 3).repeat_interleave(300)
    torch.nn.functional.embedding(rows, table, sparse=True).sum().mul(fw.rank() + 1).backward()
    exact = torch.zeros(ROWS, 2)
    exact[: rows.max() + 1] = 300.0 * 6
    assert table.grad.is_sparse
    assert table.grad.is_coalesced()
    assert table.grad.dtype == dtype
    assert torch.equal(table.grad.to_dense(), exact.to(dtype))
    return [table.grad.indices(), table.grad.values()]


@ranks(3)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another(passes):
    """And missing on the third: their sum counts."""
    table = torch.nn.Parameter(torch.zeros(ROWS, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD([table], lr=0.0)
    optimizer = fw.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
    for turn in range(4):
        role = (fw.rank() + turn) % 3
        table.grad = None
        for _ in range(passes):
            if role == 0:
                torch.nn.functional.embedding(torch.tensor([4, 4, 5]), table, sparse=True).sum().backward()
            elif role == 1:
                (table.sum() * 3).backward()
        optimizer.step()
        exact = torch.full((ROWS, 2), 3.0, dtype=torch.float64)
        exact[4] += 2
        exact[5] += 1
        close(table.grad.to_dense(), exact * passes / 3, 1e-12)
    return table.grad.to_dense()


@ranks(2)
@pytest.mark.parametrize("kind", ["int8", "powersgd", "topk"])
def test_beside_a_compressor(kind):
    """Dense gradients are compressed, sparse ones travel as they are."""
    model = Words(True)
    compression = getattr(fw.Compression, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    dense = Words(False)
    for turn in TURNS:
        optimizer.zero_grad()
        dense.zero_grad()
        model.loss(turn[fw.rank()], 1).backward()
        sum(dense.loss(turn[r], 1) / 2 for r in range(2)).backward()
        if dense.table.weight.grad is not None:
            assert model.table.weight.grad.is_sparse
            close(model.table.weight.grad.to_dense(), dense.table.weight.grad, 1e-12)
        close(model.rest.weight.grad, dense.rest.weight.grad, 1e-12)  # too small to be compressed
    return model.rest.weight.grad


@ranks(2)
def test_several_passes_of_a_window():
    table = torch.nn.Embedding(ROWS, 2, sparse=True).double()
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), backward_passes_per_step=2)
    for rows in ([1, 2], [2, 3 + fw.rank()]):
        table(torch.tensor(rows)).sum().backward()
    exact = torch.zeros(ROWS, 2, dtype=torch.float64)
    exact[1], exact[2], exact[3], exact[4] = 1, 2, 0.5, 0.5
    assert torch.equal(table.weight.grad.to_dense(), exact)
    return table.weight.grad.to_dense()
