"""PostLocalSGDOptimizer and averagers attached to a step: hooks, schedulers, state (M4), GradScaler (M5)."""

import copy
import gc
import io
import pickle
import sys
import warnings
import weakref

import pytest
import torch
from averaging_helpers import Replay, registered, start
from rank_helpers import close, data, everyone, ranks, wait_until, weights

import fusewire as fw
from fusewire.averaging import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def batch(turn, rank=None):
    return data(6, 4, seed=10 * turn + (fw.rank() if rank is None else rank))


def train(model, optimizer, turns, rank=None):
    for turn in turns:
        optimizer.zero_grad()
        model(batch(turn, rank)).pow(2).mean().backward()
        optimizer.step()


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=0.05, **options)


def mean_by_hand(models):
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack(list(parameters)).mean(0)
            for parameter in parameters:
                parameter.copy_(mean)


def replayed(turns, fires, make=adam):
    """The models of all ranks, trained in this process."""
    models = [make_model() for _ in range(fw.size())]
    optimizers = [make(model) for model in models]
    for turn in turns:
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train(model, optimizer, [turn], rank)
        if fires(turn):
            mean_by_hand(models)
    return models[fw.rank()]


def same(model, right, tolerance=1e-12):
    for parameter, expected in zip(model.parameters(), right.parameters(), strict=True):
        close(parameter.detach(), expected.detach(), tolerance)


def forms(model, averager, local=adam):
    """An averager joined to a step in each of the ways there are."""
    optimizer = local(model)
    yield PostLocalSGDOptimizer(optimizer, averager())
    averager().attach(optimizer)
    yield optimizer


@ranks(1, 2, 3)
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_training(form, fused):
    def local(model):
        return adam(model, fused=fused)

    model = make_model()
    optimizer = list(forms(model, lambda: PeriodicModelAverager(3, 2), local))[form]
    if form == 0:
        model = make_model()
        optimizer = PostLocalSGDOptimizer(local(model), PeriodicModelAverager(3, 2))
    train(model, optimizer, range(9))
    same(model, replayed(range(9), lambda t: t >= 2 and (t - 2) % 3 == 0, local))
    assert optimizer.state[model[0].weight]["step"] == 9
    return weights(model)  # turn 8 averaged


@ranks(4)
@pytest.mark.parametrize("form", ["wrapper", "attached", "attached first"])
def test_gradients_inside_of_a_host_models_between_hosts(form):
    """Gradients averaged by DistributedOptimizer over a set, models by the averager over all."""
    host = registered([0, 1], [2, 3])[fw.rank() // 2]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(4, 1)
    if form == "attached first":
        averager.attach(optimizer)
    optimizer = fw.DistributedOptimizer(optimizer, process_set=host)
    if form == "wrapper":
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    elif form == "attached":
        averager.attach(optimizer)
    models = [make_model() for _ in range(2)]
    for turn in range(8):
        train(model, optimizer, [turn])
        for number, alone in enumerate(models):
            plain = torch.optim.SGD(alone.parameters(), lr=0.1)
            both = torch.cat([batch(turn, 2 * number), batch(turn, 2 * number + 1)])
            plain.zero_grad()
            alone(both).pow(2).mean().backward()
            plain.step()
        if turn in (1, 5):
            mean_by_hand(models)
    same(model, models[fw.rank() // 2])


@ranks(2)
def test_the_context_manager():
    """One with-block is one step; an exception inside means that it was none."""
    averager = PeriodicModelAverager(2, 1)
    replay = Replay(2)
    w = torch.nn.Parameter(start(2)[fw.rank()].clone())
    for turn in range(6):
        with averager.averaging([w]):
            with torch.no_grad():
                w.copy_(0.9 * w + torch.sin(w + fw.rank()) / (turn + 1))
        replay.step([[0, 1]] if turn % 2 else [])
        close(w.detach(), replay.weights[fw.rank()], 1e-12)
    with pytest.raises(KeyError):
        with averager.averaging([w]):
            raise KeyError
    assert averager.step == 6


@ranks(2)
def test_the_wrapper_is_the_optimizer_inside():
    model = make_model()
    local = torch.optim.SGD([("a", model[0].weight), ("b", model[0].bias)], lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert repr(optimizer) == repr(local)
    assert optimizer.optim is local
    assert "differentiable" in local.defaults
    optimizer.add_param_group({"params": [("c", model[2].weight)], "lr": 0.5})
    assert optimizer.param_groups is local.param_groups
    assert len(local.param_groups) == 2
    model(batch(0)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert not model[0].weight.grad.any()
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is local.param_groups  # W5: torch's own keeps a list that nobody steps
    assert optimizer.state is local.state
    assert optimizer.defaults is local.defaults
    with pytest.raises(AttributeError, match="nonsense"):
        optimizer.nonsense  # noqa: B018
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        PostLocalSGDOptimizer(model, PeriodicModelAverager(2))

    class Bare(torch.optim.Optimizer):
        def step(self):
            pass

    defaults = {}
    PostLocalSGDOptimizer(Bare(model.parameters(), defaults), PeriodicModelAverager(2))
    assert defaults == {}


@ranks(2)
def test_hooks_run_around_the_part_they_were_registered_for():
    w = torch.nn.Parameter(torch.full((1,), float(fw.rank())))
    w.grad = torch.zeros(1)
    local = torch.optim.SGD([w], lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2))
    seen = []
    local.register_step_post_hook(lambda *_: seen.append(("local", w.item())))
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", w.item())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", w.item())))
    optimizer.step()
    states = []
    optimizer.register_state_dict_pre_hook(lambda o: states.append(o))
    optimizer.register_state_dict_post_hook(lambda o, state: states.append(o))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: states.append(o))
    optimizer.register_load_state_dict_post_hook(lambda o: states.append(o))
    optimizer.load_state_dict(optimizer.state_dict())
    assert states == [local] * 4
    assert seen == [("before", fw.rank()), ("local", fw.rank()), ("after", 0.5)]


@ranks(2)
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_made_before_or_after(form, early):
    """W4: no false warning, and its learning rate is the one used; a second scheduler too."""
    w = torch.nn.Parameter(torch.zeros(1))
    local = torch.optim.SGD([w], lr=1.0)
    make = torch.optim.lr_scheduler.StepLR
    averager = PeriodicModelAverager(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(local, 1, 0.5)] if early else []
        optimizer = PostLocalSGDOptimizer(local, averager) if form == 0 else local
        if form == 1:
            averager.attach(optimizer)
        if not early:
            schedulers = [make(optimizer, 1, 0.5), make(optimizer, 100)]
        for _ in range(3):
            w.grad = torch.full((1,), 2.0 * fw.rank())
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
    assert averager.step == 3
    fires = -1.0 - 0.25  # turns 0 and 2 at rates 1 and 0.25, after the mean of the gradients 0 and 2
    assert w.item() == fires - 0.5  # turn 1, at 0.5, is in the mean of turn 2
    pickle.dumps(schedulers[0].state_dict())
    return w


@ranks(2)
def test_a_closure_and_what_it_returns():
    w = torch.nn.Parameter(torch.full((1,), float(fw.rank())))
    for form in (0, 1):
        local = torch.optim.LBFGS([w], lr=0.1, max_iter=2)
        averager = PeriodicModelAverager(2)
        optimizer = PostLocalSGDOptimizer(local, averager) if form == 0 else local
        if form == 1:
            averager.attach(local)

        def closure():
            w.grad = None
            loss = (w - 3).pow(2).sum()
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
        assert averager.step == 1
    return w


# State


def here():
    """What a warning calls the file of this function's caller."""
    return sys._getframe(1).f_code.co_filename


@ranks(2)
@pytest.mark.parametrize("at", [1, 3, 4, 5, 7])
def test_resuming_continues_exactly(at):
    """M4: saved and loaded in the middle of the warm-up, at its end, and between two averagings."""

    def make():
        model = make_model()
        return model, PostLocalSGDOptimizer(adam(model), PeriodicModelAverager(3, 4))

    model, optimizer = make()
    train(model, optimizer, range(at))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(at, 11))
    again, resumed = make()
    file.seek(0)
    state = torch.load(file)
    assert state["optimizer"]["step"] == at
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert resumed.averager.step == at
    train(again, resumed, range(at, 11))
    assert resumed.averager.step == 11
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    return weights(model)


@ranks(2)
def test_the_state_of_an_averager():
    for make in (lambda: PeriodicModelAverager(2, 3), lambda: HierarchicalModelAverager({2: 1, 4: 2}, 3)):
        first, second = make(), make()
        w = torch.nn.Parameter(torch.ones(1))
        for _ in range(5):
            first.average_parameters([w])
        second.load_state_dict(first.state_dict())
        assert second.step == 5
        with pytest.warns(UserWarning, match="does not contain a step counter") as caught:
            second.load_state_dict({})
        assert second.step == 0
        assert caught[0].filename == here()


@ranks(1)
def test_a_state_without_a_counter_warns():
    model = make_model()
    optimizer = PostLocalSGDOptimizer(adam(model), PeriodicModelAverager(2))
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert state.keys() == {"state", "param_groups", "step"}
    del state["step"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.averager.step == 3
    with pytest.warns(UserWarning, match="step counter") as caught:
        optimizer.load_state_dict(state)
    assert [warning.filename for warning in caught] == [here()]
    assert optimizer.averager.step == 0


@ranks(2)
def test_the_root_s_state_goes_to_all():
    """broadcast_optimizer_state carries the counter with it: a rank that starts late joins in at the right step."""
    model = make_model()
    optimizer = PostLocalSGDOptimizer(adam(model), PeriodicModelAverager(4))
    optimizer.averager.step = 3 if fw.rank() == 0 else 0
    fw.broadcast_optimizer_state(optimizer)
    assert optimizer.averager.step == 3


@ranks(2)
def test_a_copy_is_a_plain_local_optimizer():
    """W3: as with DistributedOptimizer."""
    model = make_model()
    for optimizer in forms(model, lambda: PeriodicModelAverager(2)):
        train(model, optimizer, [0])
        for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(copied) is torch.optim.Adam
            if fw.rank() == 0:  # alone: it would hang if it averaged
                before = weights(model)
                for parameter in copied.param_groups[0]["params"]:
                    parameter.grad = torch.ones_like(parameter)
                copied.step()
                assert all(torch.equal(before[name], p) for name, p in weights(model).items())


# Attachments


@ranks(2)
def test_a_handle_ends_it():
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    averager = PeriodicModelAverager(2)

    def step():
        w.grad = torch.ones(1)
        optimizer.step()

    handle = averager.attach(optimizer)
    with pytest.raises(ValueError, match="another optimizer"):
        averager.attach(torch.optim.SGD([w], lr=1.0))
    step()
    handle.remove()
    handle.remove()
    step()
    assert averager.step == 1
    assert "step" not in optimizer.__dict__
    assert not hasattr(optimizer, "_step_supports_amp_scaling")
    with averager.attach(optimizer):
        step()
    step()
    assert averager.step == 2
    assert w.item() == -4


@ranks(1)
def test_attachments_and_schedulers_in_any_order_of_removal():
    w = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([w], lr=1.0)
    first, second = PeriodicModelAverager(2), PeriodicModelAverager(3)
    one = first.attach(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)
    two = second.attach(optimizer)
    w.grad = torch.ones(1)
    optimizer.step()
    one.remove()
    optimizer.step()
    assert (first.step, second.step) == (1, 2)
    first.attach(optimizer)
    optimizer.step()
    two.remove()
    optimizer.step()
    assert (first.step, second.step) == (3, 3)
    assert w.item() == -4


@ranks(1)
def test_dropping_an_optimizer_frees_it_at_once():
    """No cycle keeps it until the garbage collector comes."""
    w = torch.nn.Parameter(torch.zeros(1))
    averager = PeriodicModelAverager(2)
    optimizer = torch.optim.SGD([w], lr=1.0)
    averager.attach(optimizer)
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    averager.attach(torch.optim.SGD([w], lr=1.0)).remove()


# GradScaler


def amp_turn(model, optimizer, scaler, turn, bad, unscale):
    optimizer.zero_grad()
    loss = model(batch(turn).float()).pow(2).mean()
    scaler.scale(loss * float("inf") if bad else loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


@ranks(2)
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam", "fused adam"])
def test_an_infinity_on_one_rank(form, unscale, kind):
    """M5: that rank leaves out its update, all average at the same steps; as plain optimizers averaged by hand."""

    def local(model):
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return adam(model, fused=kind == "fused adam")

    model, alone = make_model().float(), make_model().float()
    averager = PeriodicModelAverager(2, 1)
    optimizer, plain = local(model), local(alone)
    if form == 0:
        optimizer = PostLocalSGDOptimizer(optimizer, averager)
    else:
        averager.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    plain_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    bad_turns = {1: [2, 3], 0: [5]}[fw.rank()]
    for turn in range(8):
        bad = turn in bad_turns
        amp_turn(model, optimizer, scaler, turn, bad, unscale)
        amp_turn(alone, plain, plain_scaler, turn, bad, unscale)
        if turn >= 1 and (turn - 1) % 2 == 0:
            fw.grouped_allreduce_([p.data for p in alone.parameters()], name=f"by hand {turn}")
        same(model, alone, 1e-6)
        assert scaler.get_scale() == plain_scaler.get_scale()
        assert "found_inf" not in optimizer.__dict__
    assert scaler.get_scale() == 1024.0 / 2 ** len(bad_turns)
    assert averager.step == 8
    state = optimizer.state[model[0].weight]
    if kind != "sgd":
        assert state["step"] == 8 - len(bad_turns)  # left out, not stepped with zeros
    return weights(model)  # turn 7 averaged


@ranks(2)
def test_a_scaler_that_is_disabled_and_one_rank_without_gradients():
    w = torch.nn.Parameter(torch.full((1,), float(fw.rank())))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([w], lr=1.0), PeriodicModelAverager(1000))
    w.grad = torch.ones(1)
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == -0.5
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    optimizer.averager.step = 0
    w.grad = None if fw.rank() == 0 else torch.full((1,), scaler.get_scale())
    scaler.step(optimizer)
    assert w.item() == -1.0
    return w


@ranks(1)
def test_half_precision_gradients_cannot_be_unscaled():
    """The rule that GradScaler has for plain optimizers."""
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    w.grad = torch.ones_like(w)
    with pytest.raises(ValueError, match="float16"):
        scaler.step(PostLocalSGDOptimizer(torch.optim.SGD([w], lr=1.0), PeriodicModelAverager(2)))


@ranks(2)
def test_forms_that_a_scaler_would_skip_refuse_it():
    """A hook by hand, a derived optimizer, and torch's own PostLocalSGDOptimizer: an error at the first step, on every
    rank, infinity or not. Without a scaler they work."""
    from torch.distributed.optim import PostLocalSGDOptimizer as Torchs

    w = torch.nn.Parameter(torch.full((1,), float(fw.rank())))

    class Function:
        """An averager that uses the function."""

        step = 0

        def average_parameters(self, params):
            fw.averaging.average_parameters(params)
            self.step += 1

    class Derived(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.averager.average_parameters(self.param_groups)

    def by_hook(averager):
        optimizer = torch.optim.SGD([w], lr=1.0)
        optimizer.register_step_post_hook(lambda *_: averager.average_parameters([w]))
        return optimizer

    def derived(averager):
        optimizer = Derived([w], lr=1.0)
        optimizer.averager = averager
        return optimizer

    for form in (by_hook, derived, lambda averager: Torchs(torch.optim.SGD([w], lr=1.0), averager)):
        for make in (lambda: PeriodicModelAverager(2, 5), lambda: HierarchicalModelAverager({2: 2}, 5), Function):
            averager = make()
            optimizer = form(averager)
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.zeros(()))
            w.grad = torch.zeros(1)
            with pytest.raises(RuntimeError, match="GradScaler skips"):
                scaler.step(optimizer)
            assert averager.step == 0
            optimizer.step()
            assert averager.step == 1


@ranks(2)
def test_a_scaler_with_an_explicit_call_and_with_the_context():
    """After scaler.step, or around it, every rank calls."""
    for explicit in (True, False):
        model = make_model().float()
        optimizer, averager = adam(model), PeriodicModelAverager(1000)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        bad = fw.rank() == 1
        if explicit:
            amp_turn(model, optimizer, scaler, 0, bad, False)
            averager.average_parameters(model.parameters())
        else:
            with averager.averaging(model.parameters()):
                amp_turn(model, optimizer, scaler, 0, bad, False)
        assert (model[0].weight in optimizer.state) is not bad
        assert len({tuple(row) for row in everyone(model[0].weight.flatten().tolist())}) == 1


@ranks(1)
def test_a_dropped_wrapper_lets_go_of_everything():
    w = torch.nn.Parameter(torch.zeros(1))
    gone = weakref.ref(w)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD([w], lr=1.0), PeriodicModelAverager(2))
    w.grad = torch.ones(1)
    optimizer.step()
    del optimizer, w
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
