"""Protocol of the gradient reducer where ranks differ from each other. Ranks are threads of this process."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusewire
from fusewire import _core


def on_ranks(size, body):
    """body(engine, rank) on every rank; returns the results, raises the first error."""
    engines = _core.make_in_process_engines(size, {"stall_abort_time": "20"})
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank] = body(engines[rank], rank)
        except BaseException as error:  # handed to the test
            errors.append(error)
            engines[rank].shutdown(False, str(error))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.shutdown()
    if errors:
        raise errors[0]
    return results


def wrap(parameters, engine, **options):
    return fusewire.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), engine=engine, **options)


def filled(rows, columns):
    layer = torch.nn.Linear(columns, rows)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.bias.zero_()
    return layer


@pytest.mark.parametrize("op", [fusewire.Average, fusewire.Sum])
def test_a_gradient_fires_more_often_on_one_rank_than_it_used_to(op):
    """Its first value has left from the hook by then, on one rank only; what comes later is reduced as well."""

    def body(engine, rank):
        layer = filled(3, 3)
        optimizer = wrap(layer.parameters(), engine, op=op)
        for step in range(6):
            often = 3 if rank == 0 and step >= 3 else 1
            optimizer.zero_grad()
            x = torch.ones(2, 3, requires_grad=True)
            sum(checkpoint(layer, x, use_reentrant=True).sum() for _ in range(often)).backward()
            total = 2.0 * (4 if step >= 3 else 2)
            assert torch.equal(layer.weight.grad, torch.full((3, 3), total / (2 if op == fusewire.Average else 1)))

    on_ranks(2, body)


def test_ranks_meet_two_optimizers_in_different_order():
    """Neither waits for its own gradients before the other has submitted its."""

    def body(engine, rank):
        one, two = filled(3, 3), filled(3, 3)
        first, second = wrap(one.parameters(), engine), wrap(two.parameters(), engine)
        for step in range(6):
            both = rank == 0 or step % 2
            first.zero_grad()
            second.zero_grad()
            loss = two(torch.ones(1, 3)).sum()
            if both:
                loss = one(torch.ones(1, 3)).sum() + loss
            loss.backward()
            first.step()
            second.step()
            assert torch.equal(one.weight.grad, torch.full((3, 3), 1.0 if step % 2 else 0.5))
        return one.weight.detach().clone()

    assert torch.equal(*on_ranks(2, body))


def test_all_ranks_fail_in_a_backward_and_go_on():
    """What had left before the error, not the same on each rank, does not reach a later pass."""

    def body(engine, rank):
        layers = [filled(3, 3) for _ in range(4)]
        optimizer = wrap([p for layer in layers for p in layer.parameters()], engine)

        def backward(scale):
            optimizer.zero_grad()
            h = torch.ones(1, 3)
            for layer in layers:
                h = layer(h)
            (scale * h.sum()).backward()

        for _ in range(2):
            backward(1.0)

        def fail(gradient):
            raise RuntimeError("on purpose")

        handle = layers[rank + 1].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            backward(100.0)
        handle.remove()
        for _ in range(2):
            backward(1.0 + rank)
            assert torch.equal(layers[-1].bias.grad, torch.full((3,), 1.5))
            assert torch.equal(layers[0].bias.grad, torch.full((3,), 1.5 * 1.5**3))

    on_ranks(2, body)


def test_a_parameter_frozen_on_one_rank_only_is_an_error():
    def body(engine, rank):
        layer = filled(2, 2)
        layer.bias.requires_grad_(rank == 0)
        optimizer = wrap(layer.parameters(), engine, named_parameters=layer.named_parameters())
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(fusewire.FusewireError, match="'bias' is frozen"):
        on_ranks(2, body)
