"""LocalSGD: gradients over all ranks in the warm-up, then inside of groups, and the model between them."""

import contextlib
import io

import pytest
import torch
from averaging_helpers import chunks, registered
from rank_helpers import close, data, ranks, units, weights

import fusewire as fw
from fusewire.averaging import LocalSGD


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def batch(turn, rank):
    return data(6, 4, seed=10 * turn + rank)


def loss_of(model, turn, rank):
    return model(batch(turn, rank)).pow(2).mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Replayed:
    """All ranks in this process: `groups` are the ranks whose gradients are averaged with each other at a turn."""

    def __init__(self, size):
        self.models = [make_model() for _ in range(size)]
        self.optimizers = [sgd(model) for model in self.models]

    def step(self, turn, groups, average_models):
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss_of(model, turn, rank).backward()
        for group in groups:
            for parameters in zip(*(self.models[rank].parameters() for rank in group), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for p in parameters:
                    p.grad.copy_(mean)
        for optimizer in self.optimizers:
            optimizer.step()
        if average_models:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in self.models), strict=True):
                    mean = torch.stack(list(parameters)).mean(0)
                    for p in parameters:
                        p.copy_(mean)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("period", "warmup"), [(2, 0), (3, 1), (3, 4), (4, 20)])
@pytest.mark.parametrize("inside", [None, 1, 2])
def test_both_phases(period, warmup, inside):
    size, rank = fw.size(), fw.rank()
    if inside is not None and size % inside:
        inside = 1
    inner = None if inside is None else registered(*chunks(size, inside))[rank // inside]
    model, replay = make_model(), Replayed(size)
    optimizer = LocalSGD(sgd(model), period, warmup, inner, named_parameters=model.named_parameters())
    for turn in range(10):
        assert optimizer.averager.step == turn
        assert optimizer.warming_up is (turn < warmup)
        optimizer.zero_grad()
        loss_of(model, turn, rank).backward()
        optimizer.step()
        fires = turn >= warmup and (turn - warmup) % period == 0
        replay.step(turn, [list(range(size))] if turn < warmup else chunks(size, inside or 1), fires)
        for p, right in zip(model.parameters(), replay.models[rank].parameters(), strict=True):
            close(p.detach(), right.detach(), 1e-12)


@ranks(2)
def test_the_wire_is_quiet_between_averagings():
    """Without `inner` nothing is sent after the warm-up but one group every period."""
    model = make_model()
    optimizer = LocalSGD(sgd(model), 3, 2)
    sent = []
    for turn in range(9):
        before = units()
        optimizer.zero_grad()
        loss_of(model, turn, fw.rank()).backward()
        optimizer.step()
        sent.append(units() - before)
    assert sent == [sent[0], sent[1], 1, 0, 0, 1, 0, 0, 1]
    assert min(sent[:2]) >= 4
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_resuming_in_either_phase(at):
    """The phase comes with the counter: into the same object, and into one that stands in the other phase."""
    (inner,) = registered([0]) if fw.rank() == 0 else registered([1])

    def make():
        model = make_model()
        return model, LocalSGD(sgd(model), 2, 4, inner if at % 2 else None)

    def train(model, optimizer, turns):
        for turn in turns:
            optimizer.zero_grad()
            loss_of(model, turn, fw.rank()).backward()
            optimizer.step()

    registered([0], [1])
    model, optimizer = make()
    train(model, optimizer, range(at))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, range(at, 9))
    other_phase, resumed = make()
    train(other_phase, resumed, range(6 if at < 4 else 1))
    for again, target in ((model, optimizer), (other_phase, resumed)):
        end = weights(model)
        file.seek(0)
        weights_then, state = torch.load(file)
        again.load_state_dict(weights_then)
        target.load_state_dict(state)
        assert target.warming_up is (at < 4)
        train(again, target, range(at, 9))
        for name, p in again.named_parameters():
            assert torch.equal(p, end[name])


@ranks(2)
def test_options_hold_in_both_phases():
    """backward_passes_per_step, names, and parameters that were added during the warm-up."""
    (both,) = registered([0, 1])
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = LocalSGD(
        torch.optim.SGD([a], lr=1.0), 1000, 2, both, named_parameters=[("a", a)], backward_passes_per_step=2
    )
    optimizer.add_param_group({"params": [b]})

    def step(passes):
        optimizer.zero_grad()
        for _ in range(passes):
            ((a + b).sum() * (fw.rank() + 1)).backward()
        optimizer.step()

    step(2)
    assert a.tolist() == b.tolist() == [-3.0, -3.0]
    optimizer.set_backward_passes_per_step(1)
    step(1)
    assert a.tolist() == b.tolist() == [-4.5, -4.5]
    assert not optimizer.warming_up
    step(1)
    assert a.tolist() == b.tolist() == [-6.0, -6.0]
    optimizer.set_backward_passes_per_step(3)
    step(3)
    assert a.tolist() == b.tolist() == [-10.5, -10.5]
    step(1)  # a partial window
    assert a.tolist() == b.tolist() == [-12.0, -12.0]
    optimizer.zero_grad()
    (a.sum() * (fw.rank() + 1)).backward()
    optimizer.synchronize()
    assert a.grad.tolist() == [1.5, 1.5]
    a.grad.fill_(1.0)  # as clipping would
    with optimizer.skip_synchronize():
        optimizer.step()
    assert a.tolist() == [-13.0, -13.0]


@ranks(2)
def test_a_plain_local_phase_has_the_same_methods():
    w = torch.nn.Parameter(torch.full((1,), float(fw.rank())))
    optimizer = LocalSGD(torch.optim.SGD([w], lr=1.0), 2)
    w.grad = torch.ones(1)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert w.item() == -0.5
    assert not hasattr(optimizer.optim, "synchronize")


@ranks(2)
def test_a_scaler():
    """In the warm-up gradients are everybody's, and so is an infinity; later it is this rank's own."""
    w = torch.nn.Parameter(torch.full((2,), 1.0))
    optimizer = LocalSGD(torch.optim.SGD([w], lr=1.0), 2, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales, seen = [], []
    for turn in range(4):
        optimizer.zero_grad()
        loss = w.sum() * (fw.rank() + 1)
        bad = fw.rank() == 1 and turn in (0, 1, 2)
        scaler.scale(loss * float("inf") if bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        seen.append(w[0].item())
    assert optimizer.averager.step == 4
    assert scales == ([2.0] * 4 if fw.rank() == 0 else [2.0, 1.0, 0.5, 0.5])
    # 0: all skip; 1: rank 0 moves to 0, rank 1 skips, mean 0.5; 2: rank 0 to -0.5; 3: -1.5 and 0.5 - 2, mean -1.5
    assert seen == ([1.0, 0.5, -0.5, -1.5] if fw.rank() == 0 else [1.0, 0.5, 0.5, -1.5])
    return w


@ranks(2)
def test_weights_and_buffers_concern_the_model():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    model[0].running_mean.fill_(float(fw.rank()))
    optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=1.0), 2, buffers=model, weights=[1, 3])
    optimizer.step()
    assert model[0].running_mean.tolist() == [0.75, 0.75]


@ranks(3)
def test_within_a_process_set():
    """Ranks outside of it train alone."""
    (chosen,) = registered([0, 2])
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = LocalSGD(torch.optim.SGD([w], lr=1.0), 2, 1, process_group=chosen)
    for _ in range(2):
        optimizer.zero_grad()
        (w * float(fw.rank())).sum().backward()
        optimizer.step()
    assert w.item() == -2.0  # of ranks 0 and 2 the mean is 1; rank 1 has gradient 1


@ranks(2)
def test_bad_arguments():
    w = torch.nn.Parameter(torch.zeros(1))

    def local():
        return torch.optim.SGD([w], lr=1.0)

    for call, words in [
        (lambda: LocalSGD(local(), 0), "period"),
        (lambda: LocalSGD(local(), 2, -1), "warmup_steps"),
        (lambda: LocalSGD(fw.DistributedOptimizer(local()), 2), "wraps the optimizer itself"),
        (lambda: LocalSGD(local(), 2, process_set=fw.global_process_set), "inner="),
        (lambda: LocalSGD(local(), 2, 3, backward_passes_per_step=0), "backward_passes_per_step"),
        (lambda: LocalSGD(local(), 2, inner=fw.ProcessSet([0, 1, 2])), "not registered"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError):
        LocalSGD(local(), 2, 3, nonsense=1)
    with pytest.raises(TypeError, match="process_group"):
        LocalSGD(local(), 2, inner="host")


@ranks(2)
def test_a_new_one_over_the_same_optimizer_after_a_new_init():
    w = torch.nn.Parameter(torch.full((1,), float(fw.rank())))
    local = torch.optim.SGD([w], lr=1.0)
    for warmup in (1, 0):
        optimizer = LocalSGD(local, 2, warmup)
        with pytest.raises(ValueError, match="wraps the optimizer itself") if warmup else contextlib.nullcontext():
            LocalSGD(local, 2)
        fw.shutdown()
        fw.init()
    optimizer = LocalSGD(local, 2)
    w.grad = torch.ones(1)
    optimizer.step()
    assert w.item() == -0.5


@ranks(2)
@pytest.mark.parametrize("op", [fw.Average, fw.Adasum])
@pytest.mark.parametrize("behind", [False, True])
def test_parameters_that_come_in_the_warm_up(op, behind):
    """By add_param_group or straight into a group: both phases know them."""
    a, b = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    both = fw.add_process_set([0, 1])
    optimizer = LocalSGD(torch.optim.SGD([a], lr=1.0), 1000, 2, both, op=op)
    for turn in range(4):
        if turn == 1:
            if behind:
                optimizer.param_groups[0]["params"].append(b)
            else:
                optimizer.add_param_group({"params": [b]})
        optimizer.zero_grad()
        (a.sum() + b.sum()).backward()
        optimizer.step()
    assert a.tolist() == [-4.0] * 2
    assert b.tolist() == [-3.0] * 2
    fw.remove_process_set(both)
