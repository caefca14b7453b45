"""Compressors with a memory: what they send, what they keep, and that training survives them."""

import pytest
import torch
from rank_helpers import close, data, engine, error_of, ranks, shard, weights

import fusewire as fw

KINDS = {
    "int8": lambda: fw.Compression.int8(min_numel=8),
    "powersgd": lambda: fw.Compression.powersgd(rank=2),
    "topk": lambda: fw.Compression.topk(0.25, min_numel=8),
}
each = pytest.mark.parametrize("kind", KINDS)


def make_model(width=32, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 2),
    ).to(dtype)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def noise(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@ranks(2, 3)
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_compressed_mean_is_near_the_mean(kind, dtype):
    """By each kind's own measure; the input stays as it is, shape and dtype too."""
    left, right = noise((40, 3), 5), noise((3, 30), 6)
    mine = ((left @ right) * (fw.rank() + 1)).to(dtype)  # of rank 3; powersgd gets rank 3 or loses one of its parts
    before = mine.clone()
    compressor = fw.Compression.powersgd(rank=3) if kind == "powersgd" else KINDS[kind]()
    result = fw.allreduce(mine, compression=compressor, name="x")
    mean = (left @ right) * (fw.size() + 1) / 2
    assert torch.equal(mine, before)
    assert (result.dtype, result.shape) == (dtype, mine.shape)
    error = (result.float() - mean).norm() / mean.norm()
    assert error < {"int8": 0.02, "powersgd": 0.02, "topk": 0.8}[kind], error
    return result


@ranks(2, 3)
@each
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_error_feedback_sends_in_the_end_what_was_left_out(kind, op):
    """The same gradient again and again: the mean of the results tends to the exact one."""
    mine = noise((24, 20), 10 + fw.rank())
    exact = sum(noise((24, 20), 10 + r) for r in range(fw.size())) / (fw.size() if op == "Average" else 1)
    compressor = KINDS[kind]()
    total, errors = torch.zeros(24, 20), []
    for turn in range(40):
        total += fw.allreduce(mine, op=getattr(fw, op), compression=compressor, name="x")
        errors.append(float((total / (turn + 1) - exact).norm() / exact.norm()))
    assert errors[-1] < 0.2 * errors[0] or errors[-1] < 1e-3, errors
    assert errors[-1] < 0.2, errors
    return total


@ranks(2)
@each
def test_without_a_name_nothing_is_remembered(kind):
    compressor = KINDS[kind]()
    results = [fw.allreduce(noise((24, 20), fw.rank()), compression=compressor) for _ in range(2)]
    assert torch.equal(*results)
    assert not compressor.state
    by_class = fw.allreduce(noise((40, 40), fw.rank()), compression=getattr(fw.Compression, kind))
    assert by_class.shape == (40, 40)
    return [*results, by_class]


@ranks(2)
@each
def test_scales_and_operators(kind):
    mine = noise((24, 20), 3)  # the same on both ranks
    plain = fw.allreduce(mine, op=fw.Sum, compression=KINDS[kind]())
    scaled = fw.allreduce(mine, op=fw.Sum, compression=KINDS[kind](), prescale_factor=0.5, postscale_factor=4.0)
    close(scaled, 2 * plain, 1e-4)
    close(fw.allreduce(mine, compression=KINDS[kind]()), plain / 2, 1e-5)
    assert isinstance(error_of(fw.allreduce, mine, op=fw.Max, compression=KINDS[kind]()), ValueError)
    assert isinstance(error_of(fw.reducescatter, mine, compression=KINDS[kind]()), ValueError)
    several = fw.grouped_allreduce([mine, mine[0], torch.arange(3)], op=fw.Sum, compression=KINDS[kind]())
    close(several[0], plain, 1e-6)
    assert torch.equal(several[1], 2 * mine[0]) or kind != "powersgd"  # one dimension: as it is
    assert several[2].tolist() == [0, 2, 4]
    return several


@ranks(2)
def test_int8_sends_a_quarter():
    """Of the bytes of float32, and of its time nothing is a loop over blocks."""
    numel = 1 << 20
    before = engine().stats()["bytes"]
    fw.allreduce(noise((numel,), fw.rank()), compression=fw.Compression.int8)
    sent = engine().stats()["bytes"] - before
    # An allgather's bytes count what comes out of it: both ranks' parts.
    assert sent <= 2 * (numel + 4 * numel // 256), sent


@ranks(2)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@each
def test_an_infinity_on_one_rank_shows_on_all_and_is_not_remembered(kind, value):
    compressor = KINDS[kind]()
    good = noise((24, 20), fw.rank())
    fw.allreduce(good, compression=compressor, name="x")
    bad = good.clone()
    if fw.rank() == 1:
        bad[3, 4] = value
    result = fw.allreduce(bad, compression=compressor, name="x")
    assert not torch.isfinite(result).all()
    after = fw.allreduce(good, compression=compressor, name="x")
    assert torch.isfinite(after).all()
    return after


@ranks(2)
@each
def test_state_dicts(kind):
    """A compressor that has loaded another's state does what that one would have done."""
    old, new = KINDS[kind](), KINDS[kind]()
    for turn in range(3):
        fw.allreduce(noise((24, 20), turn + 7 * fw.rank()), compression=old, name="x")
    state = old.state_dict()
    new.load_state_dict(state)
    for turn in range(3, 6):
        mine = noise((24, 20), turn + 7 * fw.rank())
        results = [fw.allreduce(mine, compression=one, name="x") for one in (old, new)]
        assert torch.equal(*results)
    assert set(state["state"]) == {"x"}
    return results


@ranks(2, 3)
@each
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"backward_passes_per_step": 2}], ids=str)
def test_training(kind, options):
    """Parameters that some ranks or all do not use, groups, several passes: equal weights, and a loss that falls."""
    model = make_model()
    spare = torch.nn.Parameter(torch.ones(16, 16))
    unused = torch.nn.Parameter(torch.ones(16, 16))
    compressor = KINDS[kind]()
    named = [*model.named_parameters(), ("spare", spare), ("unused", unused)]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = fw.DistributedOptimizer(optimizer, named, compression=compressor, **options)
    passes = options.get("backward_passes_per_step", 1)
    x = data(12, 8, seed=3, dtype=torch.float32)
    target = torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)
    losses = []
    for turn in range(60):
        optimizer.zero_grad()
        for _ in range(passes):
            loss = (model(shard(x)) - shard(target)).pow(2).mean() / passes
            if fw.rank() == turn % fw.size():
                loss = loss + 0.01 * spare.pow(2).mean()
            loss.backward()
        assert unused.grad is None
        optimizer.step()
        losses.append(float((model(x) - target).pow(2).mean()))
    assert losses[-1] < 0.5 * losses[0], losses
    assert not torch.equal(spare, torch.ones(16, 16))
    assert "spare" in compressor.state
    assert "unused" not in compressor.state
    return weights(model)


@ranks(3)
@each
def test_process_sets(kind):
    pair = next((s for s in _registered() if s.ranks == [0, 2]), None) or fw.add_process_set([0, 2])
    model = make_model()
    optimizer = fw.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=KINDS[kind](), process_set=pair
    )
    for turn in range(3):
        optimizer.zero_grad()
        model(data(4, 8, seed=turn + 10 * fw.rank(), dtype=torch.float32)).pow(2).mean().backward()
        optimizer.step()
    first = model[0].weight.detach()
    if fw.rank() != 1:
        total = fw.allreduce(first, op=fw.Sum, process_set=pair)
        assert torch.equal(total, 2 * first)


def _registered():
    from fusewire import process_sets

    return process_sets._registered


@ranks(2)
@each
def test_gradients_keep_their_memory_and_layout(kind):
    conv = torch.nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=0.1), compression=KINDS[kind]())
    x = noise((2, 8, 6, 6), fw.rank()).to(memory_format=torch.channels_last)
    conv(x).pow(2).mean().backward()
    grad, pointer = conv.weight.grad, conv.weight.grad.data_ptr()
    conv.zero_grad(set_to_none=False)
    conv(x).pow(2).mean().backward()
    assert conv.weight.grad is grad
    assert grad.data_ptr() == pointer
    assert grad.stride() == conv.weight.stride()
    return grad.contiguous()


@ranks(2)
@each
def test_a_scaler_skips_on_all_ranks(kind):
    model = make_model()
    optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters(), compression=KINDS[kind]())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for turn in range(5):
        before = model[2].weight.detach().clone()
        optimizer.zero_grad()
        loss = model(data(4, 8, seed=turn + 10 * fw.rank(), dtype=torch.float32)).pow(2).mean()
        scaler.scale(loss * float("inf") if turn == 2 and fw.rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model[2].weight) == (turn == 2)
    return [weights(model), scaler.get_scale()]


class Halves(fw.StatefulCompressor):
    """A user's own: sends every other time only, all of it."""

    def compress(self, tensor, name):
        entry = self.state.setdefault(name, {"turn": 0, "kept": torch.zeros_like(tensor)})
        entry["turn"] += 1
        kept = entry["kept"] + tensor
        send = entry["turn"] % 2 == 0
        entry["kept"] = torch.zeros_like(tensor) if send else kept
        return (kept if send else torch.zeros_like(tensor)), None

    def decompress(self, tensor, ctx):
        return tensor


@ranks(2)
def test_a_stateful_compressor_of_ones_own():
    p = torch.nn.Parameter(torch.zeros(3))
    compressor = Halves()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("p", p)], compression=compressor)
    seen = []
    for _ in range(4):
        optimizer.zero_grad()
        (p.sum() * (fw.rank() + 1)).backward()
        seen.append(p.grad.tolist())
    assert seen == [[0.0] * 3, [3.0] * 3] * 2
    assert compressor.state_dict()["state"]["p"]["turn"] == 4
    return p.grad


def test_arguments():
    for bad in ({"ratio": 0}, {"ratio": 1.5}, {"min_numel": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            fw.Compression.topk(**bad)
    with pytest.raises(ValueError, match="rank"):
        fw.Compression.powersgd(rank=0)
    with pytest.raises(ValueError, match="block"):
        fw.Compression.int8(block=0)
    with pytest.raises(TypeError, match="Compression"):
        fw.compression.compressor_of("int8")


@ranks(3)
@each
def test_a_rank_that_has_joined_adds_nothing(kind):
    model = make_model()
    table = torch.nn.Embedding(20, 3, sparse=True)
    named = [*model.named_parameters(), ("table", table.weight)]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = fw.DistributedOptimizer(optimizer, named, compression=KINDS[kind]())
    for turn in range(4 - fw.rank()):
        optimizer.zero_grad()
        x = data(4, 8, seed=turn + 10 * fw.rank(), dtype=torch.float32)
        (model(x).pow(2).mean() + table(torch.tensor([turn, 5])).pow(2).sum()).backward()
        optimizer.step()
    assert fw.join() == 0
    fw.broadcast_parameters(named, root_rank=0)
    return weights(model)


@ranks(2)
@each
@pytest.mark.filterwarnings("error")
def test_two_optimizers_that_ranks_meet_in_different_order(kind):
    """Each takes several operations one after the other, all of the one before any of the other."""
    models = [make_model(), make_model()]
    optimizers = [fw.DistributedOptimizer(sgd(m), m.named_parameters(), compression=KINDS[kind]()) for m in models]
    for turn in range(3):
        x = data(4, 8, seed=turn + 10 * fw.rank(), dtype=torch.float32)
        # Autograd runs the later made branch first.
        losses = [models[k](x).pow(2).mean() for k in ((0, 1) if fw.rank() == 0 else (1, 0))]
        (losses[0] + losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [weights(m) for m in models]
