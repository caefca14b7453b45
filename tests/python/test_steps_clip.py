"""Gradients are final when backward() returns: read them, clip them, drop them, in any way that plain torch allows."""

import pytest
import torch
from rank_helpers import close, counted_units, data, gradients, ranks, shard, weights

import fusewire as fw


def make_model(width=3):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(width=3, **options):
    model = make_model(width)
    return model, fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)


def summed_or_averaged(op):
    """A whole-batch loss whose gradient equals the reduced one."""
    return lambda model, batch: model(batch).pow(2).mean() * (fw.size() if op == "Sum" else 1)


@ranks(2, 3)
def test_a_gradient_read_right_after_backward_is_that_of_the_whole_batch():
    """Also without any step, many times: nothing is still in flight, nothing races with the reader."""
    model, _optimizer = make(width=200)
    alone = make_model(200)
    for turn in range(20):
        batch = data(4 * fw.size(), 4, seed=turn)
        model.zero_grad()
        alone.zero_grad()
        model(shard(batch)).pow(2).mean().backward()
        seen = gradients(model)
        alone(batch).pow(2).mean().backward()
        for (name, grad), right in zip(seen.items(), alone.parameters(), strict=True):
            close(grad, right.grad, 1e-12)
            assert torch.equal(grad, model.get_parameter(name).grad)
    return seen


@ranks(2)
def test_the_gradient_keeps_its_identity_while_it_is_reduced():
    model, optimizer = make()
    model(shard(data(8, 4))).pow(2).mean().backward()
    before = [(p.grad, p.grad.data_ptr()) for p in model.parameters()]
    optimizer.synchronize()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(shard(data(8, 4, seed=2))).pow(2).mean().backward()
    for p, (grad, pointer) in zip(model.parameters(), before, strict=True):
        assert p.grad is grad
        assert p.grad.data_ptr() == pointer
    return gradients(model)


@ranks(2)
@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("form", ["plain", "synchronize", "synchronize twice", "skip_synchronize"])
def test_clipped_gradients_are_used_and_never_reduced_again(op, form):
    model, optimizer = make(op=getattr(fw, op))
    alone = make_model()
    plain = sgd(alone.parameters())
    whole_loss = summed_or_averaged(op)
    for turn in range(3):
        batch = data(8, 4, seed=turn)
        optimizer.zero_grad()
        plain.zero_grad()
        with counted_units(4):
            model(shard(batch)).pow(2).mean().backward()
            if form.startswith("synchronize"):
                optimizer.synchronize()
            if form == "synchronize twice":
                optimizer.synchronize()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            clipped = gradients(model)
            if form == "skip_synchronize":
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        whole_loss(alone, batch).backward()
        close(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01), 1e-10)
        assert norm > 0.01, "nothing was clipped"
        plain.step()
        for name, grad in gradients(model).items():
            assert torch.equal(grad, clipped[name]), "the step has changed the clipped gradients"
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-10)
    return weights(model)


@ranks(2)
def test_synchronize_in_a_partial_window_then_clip_then_step():
    model, optimizer = make(backward_passes_per_step=4)
    alone = make_model()
    plain = sgd(alone.parameters())
    for k in range(2):
        model(shard(data(8, 4, seed=k))).pow(2).mean().backward()
        alone(data(8, 4, seed=k)).pow(2).mean().backward()
    optimizer.synchronize()
    for one, stepper in ((model, optimizer), (alone, plain)):
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
        with counted_units(0):
            stepper.step()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p, right, 1e-12)
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_backward_and_step_drops_the_gradients_as_in_plain_torch(set_to_none):
    model, optimizer = make()
    alone = make_model()
    plain = sgd(alone.parameters())
    for turn in range(4):
        batch = data(8, 4, seed=turn)
        for one, stepper, rows in ((model, optimizer, shard(batch)), (alone, plain, batch)):
            one(rows).pow(2).mean().backward()
            if turn % 2:
                stepper.zero_grad(set_to_none=set_to_none)
            stepper.step()
            stepper.zero_grad(set_to_none=set_to_none)
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-12)
    return weights(model)


@ranks(2)
def test_backward_twice_through_a_retained_graph():
    model, optimizer = make()
    alone = make_model()
    for one, rows in ((model, shard(data(8, 4))), (alone, data(8, 4))):
        loss = one(rows).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p.grad, right.grad, 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
def test_two_losses_with_a_backward_each():
    model, optimizer = make(backward_passes_per_step=2)
    alone = make_model()
    for one, rows in ((model, shard(data(8, 4))), (alone, data(8, 4))):
        out = one(rows)
        out.pow(2).mean().backward(retain_graph=True)
        out.abs().mean().backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p.grad, right.grad, 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
def test_autograd_grad_and_backward_on_inputs_do_not_disturb():
    """torch.autograd.grad accumulates nothing; backward(inputs=...) only what it names."""
    model, optimizer = make()
    with counted_units(0):
        torch.autograd.grad(model(data(4, 4)).sum(), list(model.parameters()))
    x = data(4, 4).requires_grad_()
    model(x).sum().backward(inputs=[x])
    model(shard(data(8, 4))).pow(2).mean().backward()
    alone = make_model()
    alone(data(8, 4)).pow(2).mean().backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p.grad, right.grad, 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
def test_an_error_in_a_backward_leaves_the_next_one_right():
    """A backward that dies half way, on all ranks: what had been submitted does not spoil the next gradients."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("broken on purpose")

    model, optimizer = make()
    loss = model[2](Broken.apply(model[0](shard(data(8, 4))))).pow(2).mean()
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss.backward()
    optimizer.zero_grad()
    alone = make_model()
    for seed in (2, 3):
        optimizer.zero_grad()
        alone.zero_grad()
        model(shard(data(8, 4, seed=seed))).pow(2).mean().backward()
        alone(data(8, 4, seed=seed)).pow(2).mean().backward()
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p.grad, right.grad, 1e-12)
    optimizer.step()
    return weights(model)
