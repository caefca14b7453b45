"""DistributedOptimizer(op=Adasum): local steps, whose changes are combined."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import warnings
import weakref

import pytest
import torch
from rank_helpers import close, data, error_of, ranks, wait_until, weights

import fusewire as fw


def make_model(dtype=torch.float64):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).to(dtype)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
each = pytest.mark.parametrize("kind", OPTIMIZERS)


def batch(turn, rank):
    return data(4, 4, seed=turn + 100 * rank)


def backward(model, turn, rank):
    x = batch(turn, rank).to(next(model.parameters()).dtype)
    model(x).pow(2).mean().backward()


def reference(kind, turns, prepare=lambda model: None):
    """The weights after `turns` steps: every rank's optimizer on copies of the model, their changes by allreduce."""
    model = make_model()
    copies = [copy.deepcopy(model) for _ in range(fw.size())]
    steppers = [OPTIMIZERS[kind](one.parameters()) for one in copies]
    for turn in range(turns):
        for r, (one, stepper) in enumerate(zip(copies, steppers, strict=True)):
            one.load_state_dict(model.state_dict())
            stepper.zero_grad()
            backward(one, turn, r)
            prepare(one)
            stepper.step()
        mine = copies[fw.rank()]
        for p, q in zip(model.parameters(), mine.parameters(), strict=True):
            p.data += fw.allreduce(q.detach() - p.detach(), op=fw.Adasum)
    return model, steppers


@ranks(2, 3)
@each
@pytest.mark.parametrize("clip", [False, True])
def test_steps(kind, clip):
    """Also with clipping, which changes the result; a counter of steps rises by one a step."""

    def prepare(model):
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    assert fw.DistributedOptimizer(optimizer, model.named_parameters(), op=fw.Adasum) is optimizer
    for turn in range(4):
        optimizer.zero_grad()
        backward(model, turn, fw.rank())
        prepare(model)
        optimizer.step()
    expected, _ = reference(kind, 4, prepare)
    for p, right in zip(model.parameters(), expected.parameters(), strict=True):
        close(p, right, 1e-9)
    if kind != "SGD":
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {4}
    return weights(model)


@ranks(1)
@each
@pytest.mark.parametrize("scaled", [False, True])
def test_alone_it_is_the_plain_optimizer(kind, scaled):
    """Bitwise, an infinity skipped included."""
    pairs = []
    for wrap in (True, False):
        model = make_model(torch.float32)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if wrap:
            fw.DistributedOptimizer(optimizer, op=fw.Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, enabled=scaled)
        for turn in range(5):
            optimizer.zero_grad()
            loss = model(batch(turn, 0).float()).pow(2).mean()
            scaler.scale(loss * float("inf") if scaled and turn == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        pairs.append([weights(model), scaler.get_scale()])
    for name, weight in pairs[0][0].items():
        assert torch.equal(weight, pairs[1][0][name])
        assert torch.isfinite(weight).all()
    assert pairs[0][1] == pairs[1][1]


@ranks(2)
@each
@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_skips_on_all_ranks_or_none(kind, clip):
    """And all scales back off, also where there was no infinity."""
    model, twin = make_model(torch.float32), make_model(torch.float32)
    optimizer = fw.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), op=fw.Adasum)
    unscaled = fw.DistributedOptimizer(OPTIMIZERS[kind](twin.parameters()), op=fw.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for turn in range(6):
        before = weights(model)
        bad = turn in (1, 4)
        optimizer.zero_grad()
        loss = model(batch(turn, fw.rank()).float()).pow(2).mean()
        scaler.scale(loss * float("inf") if bad and fw.rank() == turn % 2 else loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(before[name], p) for name, p in weights(model).items()) == bad
        if not bad:
            unscaled.zero_grad()
            backward(twin, turn, fw.rank())
            if clip:
                torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            unscaled.step()
    assert scaler.get_scale() == 256.0
    for p, right in zip(model.parameters(), twin.parameters(), strict=True):
        close(p, right, 1e-5)
    if kind != "SGD":
        assert {int(entry["step"]) for entry in optimizer.state.values()} == {4}
    return [weights(model), scaler.get_scale()]


@ranks(2)
@pytest.mark.parametrize("early", [False, True])
@each
def test_schedulers(kind, early):
    """Built before or after wrapping: no warning, and the rate is the one used."""
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0) if early else None
        fw.DistributedOptimizer(optimizer, op=fw.Adasum)
        scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
        for turn in range(3):
            before = weights(model)
            optimizer.zero_grad()
            backward(model, turn, fw.rank())
            optimizer.step()
            scheduler.step()
            moved = any(not torch.equal(before[name], p) for name, p in weights(model).items())
            assert moved == (turn == 0)
    return weights(model)


@ranks(2)
def test_accumulation_and_closures():
    """Gradients add up until the step; a closure is evaluated locally."""
    model, twin = make_model(), make_model()
    options = {"op": fw.Adasum, "backward_passes_per_step": 3}
    optimizer = fw.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), **options)
    optimizer.set_backward_passes_per_step(2)
    other = fw.DistributedOptimizer(OPTIMIZERS["SGD"](twin.parameters()), op=fw.Adasum)
    for turn in range(3):
        optimizer.zero_grad()
        for k in range(2):
            backward(model, 10 * turn + k, fw.rank())
        local = [p.grad.clone() for p in model.parameters()]
        optimizer.synchronize()
        assert all(torch.equal(g, p.grad) for g, p in zip(local, model.parameters(), strict=True))
        optimizer.step()

        def closure(turn=turn):
            other.zero_grad()
            loss = sum(twin(batch(10 * turn + k, fw.rank())).pow(2).mean() for k in range(2))
            loss.backward()
            return loss

        assert other.step(closure) > 0
        for p, right in zip(model.parameters(), twin.parameters(), strict=True):
            close(p, right, 1e-12)
    with pytest.raises(RuntimeError, match="Adasum"), optimizer.skip_synchronize():
        pass
    return weights(model)


@ranks(2)
def test_parameters_that_one_rank_or_nobody_uses():
    mine, nobody = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.SGD([mine, nobody, frozen], lr=0.5, weight_decay=0.1)
    fw.DistributedOptimizer(optimizer, op=fw.Adasum)
    if fw.rank() == 1:
        mine.sum().backward()
    optimizer.step()
    close(mine, torch.full((3,), 0.45), 1e-6)  # one rank's change, the other's is zero: Adasum gives the first
    assert nobody.tolist() == frozen.tolist() == [1.0] * 3
    return [mine, nobody]


@ranks(2)
@each
def test_state_dicts_copies_and_pickles(kind):
    """The state is the plain optimizer's; a copy is a local optimizer."""
    model = make_model()
    optimizer = fw.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters(), op=fw.Adasum)
    backward(model, 0, fw.rank())
    optimizer.step()
    plain = OPTIMIZERS[kind](make_model().parameters())
    plain.load_state_dict(optimizer.state_dict())
    assert len(plain.state) == len(optimizer.state)
    for local in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(local) is type(optimizer)
        with pytest.raises(RuntimeError, match="wrap it again"):
            local.synchronize()
        local.step()  # alone: nobody waits for the other rank
    before = weights(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    backward(model, 1, fw.rank())
    optimizer.step()
    assert not torch.equal(before["0.weight"], model[0].weight)
    fw.broadcast_optimizer_state(optimizer, 0)
    return weights(model)


@ranks(2, fresh=True)
def test_life_of_the_wrapping():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=fw.Adasum)
    assert isinstance(error_of(fw.DistributedOptimizer, optimizer, op=fw.Adasum), ValueError)
    backward(model, 0, fw.rank())
    fw.shutdown()
    assert isinstance(error_of(optimizer.step), fw.ShutdownError)
    fw.init()
    optimizer.step()
    assert fw.DistributedOptimizer(optimizer, model.named_parameters()) is optimizer  # now by gradients
    optimizer.zero_grad()
    backward(model, 1, fw.rank())
    after_backward = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    other = OPTIMIZERS["SGD"](make_model().parameters())
    alive = weakref.ref(fw.DistributedOptimizer(other, op=fw.Adasum))
    gc.disable()
    try:
        del other
        assert alive() is None, "dropping the optimizer ends it at once"
    finally:
        gc.enable()
    return [weights(model), after_backward]


@ranks(3)
def test_on_a_process_set():
    pair = fw.add_process_set([0, 2])
    model = make_model()
    optimizer = fw.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), op=fw.Adasum, process_set=pair)
    for turn in range(2):
        optimizer.zero_grad()
        backward(model, turn, fw.rank())
        optimizer.step()
    everybody = [fw.broadcast(model[0].weight.detach(), root_rank=r) for r in range(3)]
    assert torch.equal(everybody[0], everybody[2])
    assert not torch.equal(everybody[0], everybody[1])
    fw.remove_process_set(pair)


@ranks(2)
def test_compression():
    model, twin = make_model(torch.float32), make_model(torch.float32)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    optimizer = fw.DistributedOptimizer(optimizer, op=fw.Adasum, compression=fw.Compression.fp16)
    plain = fw.DistributedOptimizer(OPTIMIZERS["SGD"](twin.parameters()), op=fw.Adasum)
    for turn in range(3):
        for one, stepper in ((model, optimizer), (twin, plain)):
            stepper.zero_grad()
            backward(one, turn, fw.rank())
            stepper.step()
    for p, right in zip(model.parameters(), twin.parameters(), strict=True):
        close(p, right, 2e-3)
    assert isinstance(
        error_of(fw.DistributedOptimizer, plain, compression=fw.Compression.int8, op=fw.Adasum), ValueError
    )
    fresh = OPTIMIZERS["SGD"](twin.parameters())
    error = error_of(fw.DistributedOptimizer, fresh, compression=fw.Compression.int8, op=fw.Adasum)
    assert "Adasum" in str(error)
    return weights(model)


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("on purpose")
        return super().step(closure)


@ranks(2)
def test_a_step_that_raises_on_all_ranks_leaves_everything_usable():
    model = make_model()
    optimizer = fw.DistributedOptimizer(Failing(model.parameters(), lr=0.1), op=fw.Adasum)
    backward(model, 0, fw.rank())
    optimizer.fails = True
    assert isinstance(error_of(optimizer.step), ArithmeticError)
    optimizer.fails = False
    optimizer.step()
    return weights(model)


class Waiting(torch.optim.SGD):
    """Says when the local step is over, and lets something happen then."""

    after = staticmethod(lambda: None)

    def step(self, closure=None):
        super().step(closure)
        self.after()


@ranks(2)
def test_an_interrupt_while_changes_are_combined_leaves_the_weights_alone():
    model = make_model()
    optimizer = fw.DistributedOptimizer(Waiting(model.parameters(), lr=0.1), op=fw.Adasum)
    backward(model, 0, fw.rank())
    before = weights(model)
    engine = fw._core.get_default_engine()
    stepped = threading.Event()

    def interrupt():
        stepped.wait(20)
        wait_until(lambda: engine.pending > 0)
        os.kill(os.getpid(), signal.SIGINT)

    if fw.rank() == 0:
        optimizer.after = stepped.set
        thread = threading.Thread(target=interrupt)
        old = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        finally:
            thread.join()
            signal.signal(signal.SIGINT, old)
        fw.barrier()  # only now the other rank's changes come
    else:
        optimizer.after = fw.barrier
        optimizer.step()
    fw.barrier()
    if fw.rank() == 0:
        wait_until(lambda: engine.pending == 0)
        assert all(torch.equal(before[name], weight) for name, weight in weights(model).items())


@ranks(2)
@pytest.mark.parametrize("kind", ["averager", "local sgd"])
def test_a_scaler_of_an_optimizer_around_it(kind):
    """Another rank's infinity reaches the scaler, which was given the outer optimizer."""
    w = torch.nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([w], lr=1.0)
    if kind == "averager":
        inner = fw.DistributedOptimizer(inner, op=fw.Adasum)
        optimizer = fw.averaging.PostLocalSGDOptimizer(inner, fw.averaging.PeriodicModelAverager(2))
    else:
        optimizer = fw.LocalSGD(inner, 2, 4, op=fw.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for turn in range(3):
        optimizer.zero_grad()
        loss = w.sum()
        scaler.scale(loss * float("inf") if turn == fw.rank() else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 256.0
    return w


class Deaf(torch.amp.GradScaler):
    """Does by itself what GradScaler.step does."""

    def step(self, optimizer):
        self._check_inf_per_device(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        optimizer.grad_scale, optimizer.found_inf = self._scale, sum(state["found_inf_per_device"].values())
        optimizer.step()


@ranks(2)
def test_a_scaler_that_cannot_be_told():
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=fw.Adasum)
    scaler = Deaf("cpu", init_scale=1024.0)
    loss = w.sum()
    scaler.scale(loss * float("inf") if fw.rank() == 0 else loss).backward()
    with pytest.warns(UserWarning, match="cannot be told") if fw.rank() else contextlib.nullcontext():
        scaler.step(optimizer)
    return w


@ranks(2)
def test_a_scaler_and_float16():
    """Refused on all ranks, with a gradient or not, as by torch.amp.GradScaler.unscale_ itself."""
    w, v = torch.nn.Parameter(torch.ones(2, dtype=torch.float16)), torch.nn.Parameter(torch.ones(2))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([w, v], lr=1.0), op=fw.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((w if fw.rank() else v).sum()).backward()
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer)
