"""Training code of every kind, example-sized, on two ranks: the weights of one process on the whole batch."""

import pytest
import torch
from jobs import note
from rank_helpers import close, data, error_of, ranks, shard, weights
from torch.nn import functional as F

import fusewire as fw


def check(model, alone, tolerance):
    for (name, p), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, right, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def make_mlp(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    ).to(dtype)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def wrapped(model, **options):
    return fw.DistributedOptimizer(adam(model), model.named_parameters(), **options)


def pair(make=make_mlp, **options):
    """(model, its wrapped optimizer), and the same for one process alone."""
    model, alone = make(), make()
    return (model, wrapped(model, **options)), (alone, adam(alone))


def labels(rows, seed):
    return torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(seed))


@ranks(2, timeout=300)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["model", "function"])
def test_torch_compile(backend, what):
    """A compiled model, and a compiled function from the input to the loss."""
    if backend == "inductor" and what == "function":
        return None
    (model, optimizer), (alone, plain) = pair()
    torch._dynamo.reset()
    forward = torch.compile(model, backend=backend)

    def loss_of(x, y):
        return F.cross_entropy(forward(x), y)

    if what == "function":
        loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend=backend)
    for turn in range(4):
        x, y = data(8, 6, seed=turn), labels(8, turn)
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(shard(x), shard(y)).backward()
        F.cross_entropy(alone(x), y).backward()
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p.grad, right.grad, 1e-9)
        optimizer.step()
        plain.step()
    check(model, alone, 1e-8)
    torch._dynamo.reset()
    return weights(model)


@ranks(2, timeout=300)
def test_compiled_autograd_is_refused_in_one_sentence():
    """On all ranks, and without it everything goes on."""
    (model, optimizer), (alone, plain) = pair()
    torch._dynamo.reset()

    def loss(one, x):
        return one(x).pow(2).mean()

    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        error = error_of(loss(model, data(4, 6)).backward)
    assert isinstance(error, NotImplementedError), repr(error)
    assert "compiled autograd" in str(error)
    assert "compiled_autograd = False" in str(error)
    torch._dynamo.reset()
    for turn in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        loss(model, shard(data(8, 6, seed=turn))).backward()
        loss(alone, data(8, 6, seed=turn)).backward()
        optimizer.step()
        plain.step()
    check(model, alone, 1e-8)
    return weights(model)


class Block(torch.nn.Module):
    """A ResNet's basic block."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = torch.nn.GroupNorm(2, outside)
        self.conv2 = torch.nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = torch.nn.GroupNorm(2, outside)
        self.short = torch.nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else torch.nn.Identity()

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


def make_resnet():
    torch.manual_seed(1)
    layers = Block(4, 4, 1), Block(4, 8, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 3)
    return torch.nn.Sequential(*layers).double()


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"backward_passes_per_step": 2}], ids=str)
def test_channels_last_blocks(options):
    (model, optimizer), (alone, plain) = pair(make_resnet, **options)
    model.to(memory_format=torch.channels_last)
    alone.to(memory_format=torch.channels_last)
    passes = options.get("backward_passes_per_step", 1)
    for turn in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for k in range(passes):
            x = data(8, 4 * 6 * 6, seed=10 * turn + k).view(8, 4, 6, 6).to(memory_format=torch.channels_last)
            y = labels(8, turn)
            F.cross_entropy(model(shard(x)), shard(y)).backward()
            F.cross_entropy(alone(x), y).backward()
        for p in model.parameters():
            assert p.grad.stride() == p.stride()
        optimizer.step()
        plain.step()
    check(model, alone, 1e-8)
    return weights(model)


@ranks(2)
def test_fine_tuning_that_unfreezes_layer_by_layer():
    (model, optimizer), (alone, plain) = pair()
    for one in (model, alone):
        one.requires_grad_(False)
        one[3].requires_grad_(True)
    for turn in range(6):
        for one in (model, alone):
            if turn >= 2:
                one[2].requires_grad_(True)
            if turn >= 4:
                one[0].requires_grad_(True)
                one[3].requires_grad_(False)
        x, y = data(8, 6, seed=turn), labels(8, turn)
        for one, stepper, part in ((model, optimizer, shard), (alone, plain, lambda t: t)):
            stepper.zero_grad()
            F.cross_entropy(one(part(x)), part(y)).backward()
            torch.nn.utils.clip_grad_norm_([p for p in one.parameters() if p.requires_grad], 0.5)
            stepper.step()
        check(model, alone, 1e-8)
    return weights(model)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.trunk = torch.nn.Linear(6, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 2) for _ in range(3))
        self.double()

    def losses(self, x):
        hidden = torch.tanh(self.trunk(x))
        return [head(hidden).pow(2).mean() * (k + 1) for k, head in enumerate(self.heads)]


@ranks(2)
@pytest.mark.parametrize("passes", [1, 3])
def test_several_losses_with_a_backward_each(passes):
    """As three passes of one step, or each reduced on its own: the sum is the same."""
    (model, optimizer), (alone, plain) = pair(TwoHeads, backward_passes_per_step=passes)
    for turn in range(3):
        x = data(8, 6, seed=turn)
        for one, stepper, part in ((model, optimizer, shard(x)), (alone, plain, x)):
            stepper.zero_grad()
            losses = one.losses(part)
            for k, loss in enumerate(losses):
                loss.backward(retain_graph=k < 2)
            stepper.step()
        check(model, alone, 1e-8)
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("clip", [False, True])
def test_accumulation_over_the_end_of_an_epoch(clip):
    """Seven batches an epoch, a step for every three: the last one of an epoch is a short window."""
    (model, optimizer), (alone, plain) = pair(backward_passes_per_step=3)
    for epoch in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for number in range(7):
            x, y = data(8, 6, seed=10 * epoch + number), labels(8, number)
            (F.cross_entropy(model(shard(x)), shard(y)) / 3).backward()
            (F.cross_entropy(alone(x), y) / 3).backward()
            if number % 3 == 2 or number == 6:
                optimizer.synchronize()
                if clip:
                    for one in (model, alone):
                        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                optimizer.step()
                plain.step()
                optimizer.zero_grad()
                plain.zero_grad()
        check(model, alone, 1e-8)
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_autocast_and_a_scaler_with_clipping(compression):
    """bfloat16 activations, float32 weights, an infinity now and then."""

    def make():
        return make_mlp(torch.float32)

    (model, optimizer), (alone, plain) = pair(make, compression=getattr(fw.Compression, compression))
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) for _ in range(2)]
    for turn in range(8):
        x, y = data(8, 6, seed=turn, dtype=torch.float32), labels(8, turn)
        bad = turn in (2, 5)
        for one, stepper, scaler, part in (
            (model, optimizer, scalers[0], shard),
            (alone, plain, scalers[1], lambda t: t),
        ):
            stepper.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(one(part(x)).float(), part(y))
            if bad and (one is alone or fw.rank() == 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            scaler.step(stepper)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    check(model, alone, 2e-2)  # activations are rounded to bfloat16 for another batch size
    return [weights(model), scalers[0].get_scale()]


class Images(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        return self.rows[index]


class Colliding(Images):
    """Its workers try what they must not."""

    def __getitem__(self, index):
        try:
            fw.allreduce(torch.ones(2), name="in a worker")
        except fw.FusewireError as error:
            return torch.tensor([float(index), float("fork" in str(error))])
        return torch.tensor([float(index), -1.0])


def train_with_workers():
    fw.init()
    torch.set_num_threads(1)
    (model, optimizer), (alone, plain) = pair()
    rows = data(32, 6, seed=7)
    loader = torch.utils.data.DataLoader(
        Images(rows[fw.rank() :: 2]), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    for _epoch in range(2):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            plain.zero_grad()
            model(batch).pow(2).mean().backward()
            alone(rows[8 * number : 8 * number + 8]).pow(2).mean().backward()
            optimizer.step()
            plain.step()
    check(model, alone, 1e-8)
    guilty = torch.utils.data.DataLoader(Colliding(range(4)), num_workers=1, multiprocessing_context="fork")
    note(refused=[row[0, 1].item() for row in guilty])
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    fw.barrier()


def test_data_loader_workers_forked_after_init(launcher):
    """Training with them is training; a call in one of them raises at once and harms nobody."""
    for end in launcher.run(train_with_workers, 2):
        assert end.code == 0, end.errors
        assert end.note("refused") == [1.0] * 4
