"""Unusual graphs: tied weights, activation checkpointing of every kind, graphs of gradients, two players."""

import pytest
import torch
from rank_helpers import close, counted_units, data, ranks, shard, weights
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fusewire as fw


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Net(torch.nn.Module):
    """Three layers; `mode` says which of them are checkpointed, and how."""

    def __init__(self, mode="none", reentrant=False, tied=False):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.double()
        if tied:
            self.layers[2].weight = self.layers[0].weight
        self.mode, self.reentrant = mode, reentrant

    def forward(self, x):
        def run(layer, x):
            return torch.tanh(layer(x))

        if self.mode != "none":
            x = x.clone().requires_grad_()  # reentrant checkpointing wants an input that does
        for index, layer in enumerate(self.layers):
            if self.mode == "all" or (self.mode == "middle" and index == 1):
                x = checkpoint(run, layer, x, use_reentrant=self.reentrant)
            elif self.mode == "same twice" and index == 1:
                x = checkpoint(run, layer, x, use_reentrant=self.reentrant)
                x = checkpoint(run, layer, x, use_reentrant=self.reentrant)
            else:
                x = run(layer, x)
                if index == 1 and self.mode == "none twice":
                    x = run(layer, x)
        return x


def train_and_compare(model, alone, expected_units=None, passes=1, **options):
    optimizer = sgd(model.parameters())
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes, **options)
    plain = sgd(alone.parameters())
    for turn in range(3):
        for one, stepper in ((model, optimizer), (alone, plain)):
            stepper.zero_grad()
            for k in range(passes):
                batch = data(8, 4, seed=10 * turn + k)
                loss = one(shard(batch) if one is model else batch).pow(2).mean()
                if one is model and expected_units is not None and k == passes - 1:
                    with counted_units(expected_units):
                        loss.backward()
                else:
                    loss.backward()
        for (name, p), right in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, right.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        optimizer.step()
        plain.step()
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-10)
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("passes", [1, 2])
def test_tied_weights(passes):
    return train_and_compare(Net(tied=True), Net(tied=True), expected_units=5, passes=passes)


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("mode", ["middle", "all", "same twice"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_checkpointed_layers(mode, reentrant, tied):
    """One layer, every layer, and one layer twice: one reduction's worth of the right value."""
    alone = Net("none twice" if mode == "same twice" else "none", tied=tied)
    units = None if reentrant else 5 if tied else 6  # re-entrant engines may fire a shared weight more than once
    return train_and_compare(Net(mode, reentrant, tied), alone, expected_units=units)


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_with_several_passes_and_with_groups(reentrant):
    return [
        train_and_compare(Net("all", reentrant), Net(), passes=3),
        train_and_compare(Net("all", reentrant), Net(), groups=1),
        train_and_compare(Net("all", reentrant, tied=True), Net(tied=True), groups=2),
        train_and_compare(Net("all", reentrant), Net(), op=fw.Average, gradient_predivide_factor=2.0),
    ]


@ranks(2)
def test_reentrant_checkpointing_without_any_layer_outside():
    """The whole model is one re-entrant segment: all hooks fire inside inner backwards."""

    class Whole(Net):
        def forward(self, x):
            return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=True)

    return train_and_compare(Whole(), Net(), expected_units=6)


@ranks(2)
def test_nested_reentrant_checkpoints():
    class Nested(Net):
        def forward(self, x):
            sequence = torch.nn.Sequential(*(torch.nn.Sequential(layer, torch.nn.Tanh()) for layer in self.layers))

            def inner(x):
                return checkpoint_sequential(sequence[1:], 2, x, use_reentrant=True)

            return checkpoint(inner, sequence[0](x), use_reentrant=True)

    return train_and_compare(Nested(), Net())


@ranks(2)
def test_create_graph():
    """A gradient penalty: the backward of a backward."""

    class Penalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x):
            x = x.clone().requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return torch.cat([out, slope], 1)

    return train_and_compare(Penalised(), Penalised(), expected_units=6)


@ranks(2)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_with_create_graph():
    model, alone = Net(), Net()
    optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    plain = sgd(alone.parameters())
    for turn in range(2):
        for one, stepper, batch in (
            (model, optimizer, shard(data(8, 4, seed=turn))),
            (alone, plain, data(8, 4, seed=turn)),
        ):
            stepper.zero_grad()
            with counted_units(6 if one is model else 0):
                one(batch).pow(2).mean().backward(create_graph=True)
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p.grad, right.grad, 1e-12)
        optimizer.step()
        plain.step()
    for one in (model, alone):
        one.zero_grad()
    return weights(model)


@ranks(2)
def test_a_gan():
    """The generator's backward fires the discriminator's hooks too, but only the generator steps; then the
    discriminator zeroes, runs its own backward and steps: equal to one process on the whole batch."""

    def players():
        torch.manual_seed(3)
        g = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()
        d = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
        return g, d

    def optimizers(g, d):
        return torch.optim.Adam(g.parameters(), lr=0.01), torch.optim.Adam(d.parameters(), lr=0.02)

    def turn_of(g, d, g_opt, d_opt, noise, real):
        g_opt.zero_grad()
        fake = g(noise)
        (-d(fake).mean()).backward()
        g_opt.step()
        d_opt.zero_grad()
        (d(fake.detach()).mean() - d(real).mean() + d(real).pow(2).mean()).backward()
        d_opt.step()

    mine, alone = players(), players()
    my_opts = [fw.DistributedOptimizer(o, m.named_parameters()) for o, m in zip(optimizers(*mine), mine, strict=True)]
    plain = optimizers(*alone)
    for turn in range(5):
        noise, real = data(8, 4, seed=turn), data(8, 4, seed=turn + 100)
        turn_of(*mine, *my_opts, shard(noise), shard(real))
        turn_of(*alone, *plain, noise, real)
        for one, other in zip(mine, alone, strict=True):
            for p, right in zip(one.parameters(), other.parameters(), strict=True):
                close(p, right, 1e-9)
    return [weights(m) for m in mine]


@ranks(2)
def test_backwards_from_several_threads():
    """Two models trained by two threads of each rank."""
    from concurrent.futures import ThreadPoolExecutor

    models, alone = [Net() for _ in range(2)], Net()
    optimizers = [
        fw.DistributedOptimizer(sgd(m.parameters()), [(f"{k}.{n}", p) for n, p in m.named_parameters()])
        for k, m in enumerate(models)
    ]

    def work(k):
        for turn in range(10):
            optimizers[k].zero_grad()
            models[k](shard(data(8, 4, seed=turn))).pow(2).mean().backward()
            optimizers[k].step()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    plain = sgd(alone.parameters())
    for turn in range(10):
        plain.zero_grad()
        alone(data(8, 4, seed=turn)).pow(2).mean().backward()
        plain.step()
    for model in models:
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-9)
    return [weights(m) for m in models]
