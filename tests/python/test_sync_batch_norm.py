"""SyncBatchNorm against one process with one big batch."""

import copy

import pytest
import torch
from rank_helpers import close, data, error_of, ranks, weights

import fusewire as fw

ORDINARY = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}
SHAPES = {2: (5,), 3: (5, 4), 4: (5, 3, 4), 5: (5, 2, 3, 2)}
ROWS = {"even": [4, 4, 4], "uneven": [1, 5, 2], "empty": [3, 0, 2]}


def whole(rows, dims, turn, dtype):
    """A batch whose parts belong to the ranks, far from zero, and the gradient of its normalised values."""
    total = sum(rows)
    numel = total * torch.Size(SHAPES[dims]).numel()
    x, slope = (data(total, numel // total, seed=turn + k).view(total, *SHAPES[dims]) for k in (0, 50))
    return (x * 3 + 20).to(dtype), slope.to(dtype)


def part(tensor, rows):
    return tensor.split(rows)[fw.rank()]


def norms(dims, dtype, **options):
    torch.manual_seed(1)
    ordinary = ORDINARY[dims](5, **options)
    synced = fw.SyncBatchNorm(5, **options)
    if ordinary.affine:
        with torch.no_grad():
            for p, q in zip(ordinary.parameters(), synced.parameters(), strict=True):
                p.uniform_(0.5, 2)
                q.copy_(p)
    return synced.to(dtype), ordinary.to(dtype)


def compare_steps(synced, ordinary, dims, rows, dtype, tolerance, change=lambda t: t):
    rows = ROWS[rows][: fw.size()]
    for turn in range(3):
        x, slope = whole(rows, dims, turn, dtype)
        x, slope = change(x), change(slope)
        mine = part(x, rows).clone().requires_grad_()
        x.requires_grad_()
        out, right = synced(mine), ordinary(x)
        close(out, part(right, rows), tolerance)
        assert out.stride() == mine.stride() or not mine.numel()
        out.backward(part(slope, rows))
        right.backward(slope)
        close(mine.grad, part(x.grad, rows), tolerance)
        for p, q in zip(synced.parameters(), ordinary.parameters(), strict=True):
            close(fw.allreduce(p.grad, op=fw.Sum), q.grad, tolerance * 10)
            p.grad = q.grad = None
        for (name, p), q in zip(synced.named_buffers(), ordinary.buffers(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    synced.eval()
    ordinary.eval()
    if ordinary.track_running_stats:
        close(synced(x), ordinary(x), tolerance)
    return [list(synced.buffers()), list(synced.parameters())]


@ranks(2, 3)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dims", SHAPES)
def test_as_one_big_batch(dims, rows):
    return compare_steps(*norms(dims, torch.float64), dims, rows, torch.float64, 1e-10)


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"momentum": 0.0, "eps": 0.1},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options(options):
    return compare_steps(*norms(4, torch.float64, **options), 4, "uneven", torch.float64, 1e-10)


@ranks(3)
@pytest.mark.parametrize("rows", ROWS)
def test_float32_to_rounding_and_channels_last(rows):
    def change(tensor):
        return tensor.to(memory_format=torch.channels_last)

    return compare_steps(*norms(4, torch.float32), 4, rows, torch.float32, 2e-5, change)


@ranks(2)
def test_bfloat16_and_autocast():
    """Statistics are wide, the result is narrow; weights may be float32, as under autocast."""
    synced, ordinary = norms(4, torch.float32)
    x, slope = whole([4, 4], 4, 0, torch.bfloat16)
    mine = part(x, [4, 4]).clone().requires_grad_()
    wide = x.float().requires_grad_()
    out = synced(mine)
    out.backward(part(slope, [4, 4]))
    right = ordinary(wide)
    right.backward(slope.float())
    assert out.dtype == mine.grad.dtype == torch.bfloat16
    close(out.float(), part(right, [4, 4]), 2e-2)
    close(mine.grad.float(), part(wide.grad, [4, 4]), 2e-2)
    return [synced.running_mean, synced.running_var]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv1 = torch.nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(4)
        self.conv2 = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.BatchNorm1d(6))
        self.double()

    def forward(self, x):
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.head(torch.relu(self.norm2(self.conv2(x)) + x))


@ranks(2, 3)
@pytest.mark.parametrize("rows", ROWS)
def test_training_with_a_distributed_optimizer(rows):
    """Uneven batches: the sum over ranks of each one's sum, divided by the number of all images."""
    rows = ROWS[rows][: fw.size()]
    alone = Net()
    model = fw.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters(), op=fw.Sum)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for turn in range(4):
        x = data(sum(rows), 2 * 16, seed=turn).view(-1, 2, 4, 4)
        for one, stepper, batch in ((model, optimizer, part(x, rows)), (alone, plain, x)):
            stepper.zero_grad()
            (one(batch).sin().sum() / sum(rows)).backward()
            stepper.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, q, 1e-9)
        for p, q in zip(model.buffers(), alone.buffers(), strict=True):
            close(p, q, 1e-9)
    model.eval()
    alone.eval()
    close(model(x), alone(x), 1e-9)
    return [weights(model), list(model.buffers())]


@ranks(2)
def test_conversion():
    """Parameters and buffers are the same objects, shared modules stay shared, and the mode is kept."""
    norm = torch.nn.BatchNorm2d(4, eps=1e-3, momentum=0.3)
    norm.eval()
    model = torch.nn.ModuleDict({"a": norm, "b": torch.nn.Sequential(norm, torch.nn.InstanceNorm2d(4, affine=True))})
    model["c"] = torch.nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = dict(model.state_dict(keep_vars=True))
    converted = fw.SyncBatchNorm.convert_sync_batchnorm(model)
    assert isinstance(converted["a"], fw.SyncBatchNorm)
    assert converted["a"] is converted["b"][0]
    assert type(converted["b"][1]) is torch.nn.InstanceNorm2d
    assert (converted["a"].eps, converted["a"].momentum, converted["a"].training) == (1e-3, 0.3, False)
    assert converted["c"].weight is None
    assert converted["c"].running_mean is None
    after = dict(converted.state_dict(keep_vars=True))
    assert list(after) == list(before)
    assert all(after[key] is value for key, value in before.items())
    assert optimizer.param_groups[0]["params"][0] is converted["a"].weight
    single = fw.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm3d(2))
    assert isinstance(single, fw.SyncBatchNorm)


@ranks(3)
def test_a_process_set():
    pair = fw.add_process_set([0, 2])
    norm = fw.SyncBatchNorm(5, process_set=pair).double()
    ordinary = torch.nn.BatchNorm1d(5).double()
    x = data(8, 5)
    if fw.rank() != 1:
        mine = x[:4] if fw.rank() == 0 else x[4:]
        close(norm(mine), ordinary(x)[:4] if fw.rank() == 0 else ordinary(x)[4:], 1e-10)
    fw.remove_process_set(pair)


@ranks(2)
def test_errors():
    norm = fw.SyncBatchNorm(5)
    assert isinstance(error_of(norm, torch.ones(5)), ValueError)
    assert "channels" in str(error_of(norm, torch.ones(2, 4)))
    rows = 1 if fw.rank() == 0 else 0
    assert "more than 1 value" in str(error_of(norm, torch.ones(rows, 5)))
    close(norm(torch.ones(1, 5) * fw.rank()), torch.full((1, 5), fw.rank() * 2.0 - 1), 1e-4)  # it still works


@ranks(2, timeout=300)
def test_inside_a_compiled_model():
    model = fw.SyncBatchNorm.convert_sync_batchnorm(Net())
    alone = Net()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    x = data(4, 2 * 16).view(-1, 2, 4, 4)
    close(compiled(part(x, [2, 2])), part(alone(x), [2, 2]), 1e-9)
    torch._dynamo.reset()


@ranks(3)
def test_a_rank_that_has_joined_adds_nothing():
    norm, ordinary = norms(2, torch.float64)
    x, slope = whole([2, 2, 2], 2, 0, torch.float64)
    if fw.rank() < 2:
        mine = x[2 * fw.rank() : 2 * fw.rank() + 2].requires_grad_()
        both = x[:4].detach().requires_grad_()
        out, right = norm(mine), ordinary(both)
        close(out, right[2 * fw.rank() : 2 * fw.rank() + 2], 1e-10)
        out.backward(slope[2 * fw.rank() : 2 * fw.rank() + 2])
        right.backward(slope[:4])
        close(mine.grad, both.grad[2 * fw.rank() : 2 * fw.rank() + 2], 1e-10)
    fw.join()
