"""Who owns a parameter, and since when: models that change under the optimizer, and optimizers that change hands."""

import gc
import weakref

import pytest
import torch
from rank_helpers import close, counted_units, data, ranks, shard, weights

import fusewire as fw


def make_model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch.to(next(model.parameters()).dtype)).pow(2).mean().backward()
    optimizer.step()


def compare(model, alone, tolerance=1e-12):
    for (name, p), right in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, right, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


@ranks(2)
@pytest.mark.parametrize("part", ["weight", "layer", "all but one"])
def test_a_parameter_frozen_when_wrapped_and_unfrozen_later(part):
    """Its gradient is reduced from the first backward after that on."""
    model, alone = make_model(), make_model()

    def switch(one, on):
        chosen = {
            "weight": [one[2].weight],
            "layer": [*one[2].parameters()],
            "all but one": [*one.parameters()][1:],
        }[part]
        for p in chosen:
            p.requires_grad_(on)

    switch(model, False)
    switch(alone, False)
    optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(alone.parameters())
    for turn in range(6):
        if turn in (2, 5):
            switch(model, True)
            switch(alone, True)
        if turn == 4:
            switch(model, False)
            switch(alone, False)
        step(model, optimizer, shard(data(8, 4, seed=turn)))
        step(alone, plain, data(8, 4, seed=turn))
        compare(model, alone)
    return weights(model)


@ranks(2)
def test_add_param_group_after_wrapping():
    model, alone = make_model(), make_model()
    optimizer = fw.DistributedOptimizer(sgd(model[0].parameters()), model.named_parameters())
    plain = sgd(alone[0].parameters())
    for turn in range(5):
        if turn == 2:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
            plain.add_param_group({"params": alone[2].parameters(), "lr": 0.3})
        step(model, optimizer, shard(data(8, 4, seed=turn)))
        step(alone, plain, data(8, 4, seed=turn))
        compare(model, alone)
    return weights(model)


@ranks(2)
def test_a_group_added_with_parameters_that_have_no_name():
    model, alone = make_model(), make_model()
    optimizer = fw.DistributedOptimizer(sgd(model[0].parameters()))
    plain = sgd(alone[0].parameters())
    step(model, optimizer, shard(data(8, 4)))
    step(alone, plain, data(8, 4))
    optimizer.add_param_group({"params": model[2].parameters()})
    plain.add_param_group({"params": alone[2].parameters()})
    for turn in range(3):
        step(model, optimizer, shard(data(8, 4, seed=turn)))
        step(alone, plain, data(8, 4, seed=turn))
    compare(model, alone)
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("keep", [True, False])
def test_a_fresh_optimizer_over_the_same_model_three_times(keep):
    """A newer wrap takes over at once, whether or not the older optimizer still lives: one reduction per gradient."""
    model, alone = make_model(), make_model()
    kept = []
    for turn in range(3):
        optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        plain = sgd(alone.parameters())
        if keep:
            kept.append(optimizer)
        for inner in range(2):
            with counted_units(4):
                step(model, optimizer, shard(data(8, 4, seed=10 * turn + inner)))
            step(alone, plain, data(8, 4, seed=10 * turn + inner))
            compare(model, alone)
    return weights(model)


@ranks(2)
def test_two_optimizers_over_two_modules_with_equal_names():
    """Both modules have a "weight"; one backward feeds both."""
    models, alone = [torch.nn.Linear(4, 2).double() for _ in range(2)], [torch.nn.Linear(4, 2).double() for _ in "ab"]
    for model, other in zip(models, alone, strict=True):
        other.load_state_dict(model.state_dict())
    optimizers = [fw.DistributedOptimizer(sgd(m.parameters()), m.named_parameters()) for m in models]
    plain = [sgd(m.parameters()) for m in alone]
    for turn in range(3):
        for pair, steppers, batch in (
            (models, optimizers, shard(data(8, 4, seed=turn))),
            (alone, plain, data(8, 4, seed=turn)),
        ):
            for one in steppers:
                one.zero_grad()
            loss = pair[0](batch).pow(2).mean() + 3 * pair[1](batch).pow(2).mean()
            with counted_units(4 if pair is models else 0):
                loss.backward()
            for one in steppers:
                one.step()
    for model, other in zip(models, alone, strict=True):
        compare(model, other)
    return [weights(m) for m in models]


@ranks(2)
def test_two_optimizers_used_in_turns():
    models = [make_model(seed) for seed in (1, 2)]
    optimizers = [fw.DistributedOptimizer(sgd(m.parameters()), m.named_parameters()) for m in models]
    for turn in range(4):
        which = turn % 2
        with counted_units(4):
            step(models[which], optimizers[which], data(6, 4, seed=turn + 10 * fw.rank()))
    return [weights(m) for m in models]


@ranks(2)
def test_dropping_an_optimizer_removes_its_hooks_at_once():
    """Without waiting for the garbage collector."""
    model = make_model()
    gc.disable()
    try:
        optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        alive = weakref.ref(optimizer)
        step(model, optimizer, data(6, 4, seed=fw.rank()))
        del optimizer
        assert alive() is None, "something holds the dropped optimizer"
        model.zero_grad()
        with counted_units(0):
            model(data(6, 4, seed=fw.rank())).pow(2).mean().backward()
    finally:
        gc.enable()
    alone = make_model()
    alone.load_state_dict(model.state_dict())
    alone(data(6, 4, seed=fw.rank())).pow(2).mean().backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, right.grad), "a gradient was still reduced"


@ranks(1, 2)
def test_wrapping_the_same_optimizer_twice_is_a_value_error():
    model = make_model()
    optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with pytest.raises(ValueError, match=r"(?i)wrap"):
        fw.DistributedOptimizer(optimizer, model.named_parameters())
    with counted_units(4):
        step(model, optimizer, data(6, 4, seed=fw.rank()))  # it goes on working
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("change", ["double", "half and back", "new data"])
def test_a_module_that_is_converted_after_wrapping(change):
    """module.double() puts a new accumulator on the parameter: it is hooked again."""
    model = make_model().float()
    alone = make_model().float()
    optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(alone.parameters())
    for turn in range(4):
        for one, stepper, batch in (
            (model, optimizer, shard(data(8, 4, seed=turn))),
            (alone, plain, data(8, 4, seed=turn)),
        ):
            if turn == 1:
                stepper.zero_grad()
                stepper.state.clear()
                if change == "double":
                    one.double()
                elif change == "half and back":
                    one.bfloat16().float()
                else:
                    for p in one.parameters():
                        p.data = p.data.clone()
            step(one, stepper, batch)
        compare(model, alone, 1e-5)
    return weights(model)


class SlowStart(torch.optim.SGD):
    """A user's optimizer whose step calls super().step(): torch's step hooks fire twice."""

    calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.calls / 3)
        return super().step(closure)


class HandMade(torch.optim.Optimizer):
    """A user's optimizer from nothing."""

    def __init__(self, parameters, rate):
        super().__init__(parameters, {"rate": rate})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["rate"])
        return loss


@ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: SlowStart(p, lr=0.1, momentum=0.9),
        lambda p: HandMade(p, 0.01),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    ],
    ids=["super().step()", "hand-made", "SGD fused", "Adam fused", "AdamW foreach"],
)
def test_optimizers_of_every_make(make):
    model, alone = make_model(), make_model()
    optimizer = fw.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    plain = make(alone.parameters())
    for turn in range(4):
        with counted_units(4):
            step(model, optimizer, shard(data(8, 4, seed=turn)))
        step(alone, plain, data(8, 4, seed=turn))
    compare(model, alone, 1e-10)
    return weights(model)


@ranks(2)
def test_set_backward_passes_per_step():
    model, alone = make_model(), make_model()
    optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(alone.parameters())
    seed = 0
    for passes in (1, 3, 2, 1):
        optimizer.set_backward_passes_per_step(passes)
        for _ in range(2):
            optimizer.zero_grad()
            plain.zero_grad()
            with counted_units(4):
                for _ in range(passes):
                    seed += 1
                    model(shard(data(8, 4, seed=seed))).pow(2).mean().backward()
                    alone(data(8, 4, seed=seed)).pow(2).mean().backward()
            optimizer.step()
            plain.step()
            compare(model, alone)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        optimizer.set_backward_passes_per_step(0)
    return weights(model)


class Tenths:
    """A user's compression class in Python: rounds to tenths, and counts its calls."""

    calls = 0

    @staticmethod
    def compress(tensor):
        Tenths.calls += 1
        return (tensor * 10).round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, dtype):
        return tensor.to(dtype) / 10


class Doubling:
    """Changes the dtype to a wider one."""

    @staticmethod
    def compress(tensor):
        return tensor.double(), tensor

    @staticmethod
    def decompress(tensor, original):
        return tensor.to(original.dtype)


@ranks(2)
def test_compression_classes_written_by_the_user():
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=Tenths, op=fw.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (p * torch.tensor([0.12, 0.28, -1.0])).sum().backward()
        close(p.grad, torch.tensor([0.2, 0.6, -2.0]), 1e-6)
        optimizer.step()
    assert Tenths.calls == 2
    model = make_model().float()
    optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), compression=Doubling)
    step(model, optimizer, data(6, 4, seed=fw.rank()))
    return [p, weights(model)]


@ranks(2)
def test_builtin_compression_in_training():
    for compression, tolerance in ((fw.Compression.fp16, 2e-3), (fw.Compression.bf16, 2e-2)):
        model, alone = make_model().float(), make_model().float()
        optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), compression=compression)
        plain = sgd(alone.parameters())
        for turn in range(3):
            step(model, optimizer, shard(data(8, 4, seed=turn)))
            step(alone, plain, data(8, 4, seed=turn).float())
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        compare(model, alone, tolerance)
    return weights(model)
