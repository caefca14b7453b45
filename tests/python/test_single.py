"""One rank: everything must behave as the n-rank formulas say for n = 1, and wrapping must change nothing."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch

import fusewire


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    fusewire.init()
    yield
    fusewire.shutdown()


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def train(net, optimizer, seed=1):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    net(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_wrapping_midway_changes_nothing(make):
    plain, wrapped = model(), model()
    plain_optimizer, optimizer = make(plain.parameters()), make(wrapped.parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(2):
        train(plain, plain_optimizer)
        train(wrapped, optimizer)
    kind, defaults = type(optimizer), dict(optimizer.defaults)
    assert fusewire.DistributedOptimizer(optimizer, wrapped.named_parameters()) is optimizer
    assert type(optimizer) is kind
    assert optimizer.defaults == defaults
    for seed in range(3):
        train(plain, plain_optimizer, seed)
        train(wrapped, optimizer, seed)
    assert same(plain, wrapped)
    assert len(seen) == 5


@pytest.mark.parametrize("copied", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copy_is_a_local_optimizer(copied):
    net = model()
    optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    train(net, optimizer)
    twin = copied(optimizer)
    before = [p.clone() for p in net.parameters()]
    fired.clear()
    for group in twin.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    twin.step()
    assert not fired
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="wrap it again"):
        twin.synchronize()
    fusewire.DistributedOptimizer(twin)
    twin.synchronize()


def test_scheduler_state_can_be_saved():
    net = model()
    optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.save(scheduler.state_dict(), io.BytesIO())


@pytest.mark.parametrize("first", ["scheduler", "wrapper"])
def test_scheduler_before_or_after_wrapping(first):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if first == "scheduler":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        fusewire.DistributedOptimizer(optimizer)
        if first == "wrapper":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(net, optimizer)
        scheduler.step()
        before = [p.clone() for p in net.parameters()]
        train(net, optimizer)
    for p, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p, old - 0.5 * p.grad)


def test_load_state_dict_reaches_step():
    net = model()
    optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    other = torch.optim.SGD(model().parameters(), lr=0.25)
    optimizer.load_state_dict(other.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.clone() for p in net.parameters()]
    train(net, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("arguments", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_zero_grad_then_a_backward_that_leaves_some_out(arguments):
    plain, wrapped = model(), model()
    extra = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    one = torch.optim.SGD([*plain.parameters(), extra[0]], lr=0.1, weight_decay=0.1, momentum=0.5)
    two = torch.optim.SGD([*wrapped.parameters(), extra[1]], lr=0.1, weight_decay=0.1, momentum=0.5)
    fusewire.DistributedOptimizer(two)
    for net, optimizer, parameter in ((plain, one, extra[0]), (wrapped, two, extra[1])):
        for use in (False, True, False):
            optimizer.zero_grad(**arguments)
            loss = net(torch.ones(2, 4)).sum() + (parameter.sum() if use else 0)
            loss.backward()
            optimizer.step()
    assert same(plain, wrapped)
    assert torch.equal(*extra)


class TestNames:
    def test_two_groups_without_names(self):
        net = model()
        groups = [{"params": [p]} for p in net.parameters()]
        train(net, fusewire.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1)))

    def test_a_generator_and_more_names_than_parameters(self):
        net = model()
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
        train(
            net, fusewire.DistributedOptimizer(optimizer, named_parameters=((n, p) for n, p in net.named_parameters()))
        )

    def test_a_missing_one(self):
        net = model()
        named = [(n, p) for n, p in net.named_parameters() if n != "2.weight"]
        with pytest.raises(ValueError, match=r"parameter 2 of group 0, shape \(2, 8\)"):
            fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), named)

    def test_duplicates(self):
        net = model()
        named = [("w", p) for p in net.parameters()]
        with pytest.raises(ValueError, match="not: w"):
            fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), named)

    def test_no_pairs(self):
        net = model()
        with pytest.raises(ValueError, match="pairs"):
            fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.parameters())

    def test_num_groups_is_groups(self):
        net = model()
        with pytest.warns(DeprecationWarning, match="groups"):
            optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), num_groups=2)
        train(net, optimizer)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"op": fusewire.Adasum, "compression": fusewire.Compression.int8}, ValueError),
        ({"op": fusewire.Max}, ValueError),
        ({"op": fusewire.Sum, "gradient_predivide_factor": 2.0}, ValueError),
        ({"gradient_predivide_factor": 0.0}, ValueError),
        ({"backward_passes_per_step": 0}, ValueError),
        ({"groups": -1}, ValueError),
        ({"groups": ["weight"]}, ValueError),
        ({"compression": "fp16"}, TypeError),
    ],
)
def test_bad_arguments(arguments, kind):
    with pytest.raises(kind):
        fusewire.DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1), **arguments)


def test_wrapping_twice():
    optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="wrapped already"):
        fusewire.DistributedOptimizer(optimizer)


def test_dropping_the_optimizer_ends_it_at_once():
    net = model()
    gc.disable()
    try:
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        train(net, optimizer)
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    units = fusewire._core.get_default_engine().stats()["units"]
    net(torch.ones(1, 4)).sum().backward()
    assert fusewire._core.get_default_engine().stats()["units"] == units


def test_a_newer_wrap_takes_over():
    net = model()
    older = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    newer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    train(net, newer)
    units = fusewire._core.get_default_engine().stats()["units"]
    older.step()
    assert fusewire._core.get_default_engine().stats()["units"] == units


class TestPasses:
    def test_a_window_of_two_passes(self):
        net = torch.nn.Linear(2, 1, bias=False)
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backward_passes_per_step=2)
        for steps in (2, 1, 0, 2):  # the third step follows no backward at all
            optimizer.zero_grad()
            for _ in range(steps):
                net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if steps:
                assert torch.equal(net.weight.grad, torch.full((1, 2), float(steps)))

    def test_an_extra_pass_with_average_is_exact(self):
        net = torch.nn.Linear(2, 1, bias=False)
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0))
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        net(torch.ones(1, 2)).sum().backward()
        assert torch.equal(net.weight.grad, torch.full((1, 2), 2.0))

    @pytest.mark.parametrize("arguments", [{"op": fusewire.Sum}, {"backward_passes_per_step": 2}])
    def test_an_extra_pass_otherwise_is_an_error(self, arguments):
        net = torch.nn.Linear(2, 1, bias=False)
        optimizer = fusewire.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters(), **arguments
        )
        for reset in ({"set_to_none": True}, {"set_to_none": False}):
            optimizer.zero_grad(**reset)
            for _ in range(arguments.get("backward_passes_per_step", 1)):
                net(torch.ones(1, 2)).sum().backward()
        with pytest.raises(fusewire.FusewireError, match="'weight'"):
            net(torch.ones(1, 2)).sum().backward()

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("op", [fusewire.Average, fusewire.Sum])
    def test_a_layer_that_is_checkpointed_twice(self, reentrant, op):
        from torch.utils.checkpoint import checkpoint

        first, shared = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        parameters = [*first.parameters(), *shared.parameters()]
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), op=op)
        for passes, checkpointed in enumerate((False, False, True, True)):
            x = torch.full((2, 3), 1.0 + passes)

            def run(distributed, x=x, checkpointed=checkpointed):
                h = first(x)
                for _ in range(2):
                    h = checkpoint(shared, h, use_reentrant=reentrant) if distributed and checkpointed else shared(h)
                return h.square().sum()

            expected = torch.autograd.grad(run(False), parameters)
            optimizer.zero_grad()
            run(True).backward()
            for p, g in zip(parameters, expected, strict=True):
                torch.testing.assert_close(p.grad, g)

    def test_a_parameter_that_starts_to_fire_twice(self):
        from torch.utils.checkpoint import checkpoint

        layer = torch.nn.Linear(3, 3)
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.0), op=fusewire.Sum)
        for times in (1, 1, 3, 3, 1):
            x = torch.randn(2, 3, requires_grad=True)
            expected = [torch.zeros_like(p) for p in layer.parameters()]
            for _ in range(times):
                gradients = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
                expected = [e + g for e, g in zip(expected, gradients, strict=True)]
            optimizer.zero_grad()
            sum(checkpoint(layer, x, use_reentrant=True).square().sum() for _ in range(times)).backward()
            for p, g in zip(layer.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, g)

    def test_a_backward_that_fails_is_followed_by_one_that_works(self):
        net = model()
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0))
        for _ in range(2):
            train(net, optimizer)

        def fail(gradient):
            raise RuntimeError("on purpose")

        handle = net[0].weight.register_hook(fail)
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="on purpose"):
            net(torch.ones(1, 4)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        expected = torch.autograd.grad(net(torch.ones(1, 4)).sum(), list(net.parameters()))
        for p, g in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g)

    def test_double_after_wrapping(self):
        net = model()
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        train(net, optimizer)
        net.double()
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
        assert all(p.grad.dtype is torch.float64 for p in net.parameters())

    def test_gradients_keep_their_memory(self):
        net = model()
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        train(net, optimizer)
        kept = [(p.grad, p.grad.data_ptr()) for p in net.parameters()]
        optimizer.zero_grad(set_to_none=False)
        net(torch.ones(1, 4)).sum().backward()
        assert all(p.grad is g and g.data_ptr() == at for p, (g, at) in zip(net.parameters(), kept, strict=True))

    def test_an_expanded_gradient_becomes_dense(self):
        parameter = torch.nn.Parameter(torch.zeros(3, 4))
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        parameter.grad = torch.ones(1, 4).expand(3, 4)
        optimizer.synchronize()
        assert torch.equal(parameter.grad, torch.ones(3, 4))
        assert parameter.grad.is_contiguous()

    def test_sparse(self):
        layer = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), sparse_as_dense=True)
        layer(torch.tensor([1, 1])).sum().backward()
        assert torch.equal(layer.weight.grad, torch.tensor([[0.0, 0], [2, 2], [0, 0], [0, 0], [0, 0]]))
        optimizer.step()
        kept = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(kept.parameters(), lr=0.1))
        kept(torch.tensor([1, 1])).sum().backward()
        assert kept.weight.grad.is_sparse
        assert torch.equal(kept.weight.grad.to_dense(), layer.weight.grad)
        optimizer.step()

    @pytest.mark.parametrize("where", ["positional", "keyword"])
    def test_closures(self, where):
        plain, wrapped = model(), model()
        one = torch.optim.LBFGS(plain.parameters(), max_iter=5)
        two = fusewire.DistributedOptimizer(torch.optim.LBFGS(wrapped.parameters(), max_iter=5))
        for net, optimizer in ((plain, one), (wrapped, two)):

            def closure(net=net, optimizer=optimizer):
                optimizer.zero_grad()
                loss = net(torch.ones(2, 4)).square().sum()
                loss.backward()
                return loss

            for _ in range(2):
                optimizer.step(closure) if where == "positional" else optimizer.step(closure=closure)
        assert same(plain, wrapped)

    def test_a_step_that_calls_super(self):
        class Mine(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        plain, wrapped = model(), model()
        one = torch.optim.SGD(plain.parameters(), lr=0.1)
        two = fusewire.DistributedOptimizer(Mine(wrapped.parameters(), lr=0.1))
        for _ in range(3):
            train(plain, one)
            train(wrapped, two)
        assert same(plain, wrapped)

    def test_a_compressor_written_in_python(self):
        class Halves(fusewire.Compressor):
            @staticmethod
            def compress(tensor):
                return tensor / 2, tensor.shape

            @staticmethod
            def decompress(tensor, ctx):
                assert tensor.shape == ctx
                return tensor * 2

        plain, wrapped = model(), model()
        one = torch.optim.SGD(plain.parameters(), lr=0.1)
        two = fusewire.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1), compression=Halves)
        for _ in range(3):
            train(plain, one)
            train(wrapped, two)
        assert same(plain, wrapped)

    def test_a_grown_optimizer(self):
        net, more = model(), torch.nn.Linear(2, 2)
        optimizer = fusewire.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        before = fusewire._core.get_default_engine().stats()["units"]
        optimizer.add_param_group({"params": more.parameters()})
        more(net(torch.ones(1, 4))).sum().backward()
        assert fusewire._core.get_default_engine().stats()["units"] >= before + 6


class TestOperations:
    def test_scales(self):
        x = torch.tensor([2.0, 4.0])
        assert fusewire.allreduce(x, op=fusewire.Sum, prescale_factor=0.5, postscale_factor=3.0).tolist() == [3.0, 6.0]
        assert fusewire.allreduce(x, prescale_factor=0.5).tolist() == [1.0, 2.0]
        whole = torch.tensor([2, 4, 6, 16])
        assert fusewire.allreduce(whole, op=fusewire.Sum, prescale_factor=0.25, postscale_factor=4).tolist() == [
            2,
            4,
            6,
            16,
        ]

    def test_forms(self):
        x = torch.arange(3.0)
        assert fusewire.allreduce_(x) is x
        handle = fusewire.allreduce_async_(x, name="x")
        assert fusewire.synchronize(handle) is x
        assert fusewire.poll(handle)
        assert handle.wait() is x
        many = fusewire.grouped_allreduce([x, x.long()])
        assert [t.dtype for t in many] == [torch.float32, torch.int64]
        assert fusewire.grouped_allreduce_([x])[0] is x
        assert torch.equal(fusewire.broadcast(x, 0), x)
        assert fusewire.broadcast_(x, root_rank=0) is x
        fusewire.barrier()

    def test_old_spelling_of_the_operator(self):
        x = torch.ones(2)
        assert torch.equal(fusewire.allreduce(x, average=False), x)
        with pytest.raises(ValueError, match="not both"):
            fusewire.allreduce(x, average=True, op=fusewire.Sum)

    @pytest.mark.parametrize(
        ("call", "kind"),
        [
            (lambda: fusewire.allreduce(torch.ones(2, dtype=torch.bool)), TypeError),
            (lambda: fusewire.allreduce_(torch.ones(1).expand(3)), ValueError),
            (lambda: fusewire.allreduce([1.0]), TypeError),
            (lambda: fusewire.allreduce(torch.ones(2).to_sparse()), TypeError),
            (lambda: fusewire.allreduce(torch.ones(2), name=3), TypeError),
            (lambda: fusewire.allreduce(torch.ones(2), op="sum"), TypeError),
            (lambda: fusewire.allreduce(torch.ones(2, dtype=torch.int64), op=fusewire.Adasum), TypeError),
            (lambda: fusewire.allreduce(torch.ones(2), op=77), ValueError),
            (lambda: fusewire.broadcast(torch.ones(2), 1), ValueError),
            (lambda: fusewire.allreduce(torch.ones(2), process_set=fusewire.ProcessSet([0])), ValueError),
        ],
    )
    def test_mistakes(self, call, kind):
        with pytest.raises(kind):
            call()
        assert torch.equal(fusewire.allreduce(torch.ones(2)), torch.ones(2))

    def test_views_that_are_conjugated(self):
        x = torch.tensor([1 + 2j, 3 - 1j])
        view = x.conj()
        assert fusewire.allreduce_(view, op=fusewire.Sum, postscale_factor=2.0) is view
        assert torch.equal(x, torch.tensor([2 + 4j, 6 - 2j]))

    def test_gradients_pass_through(self):
        x = torch.ones(3, requires_grad=True)
        y = fusewire.allreduce(x, op=fusewire.Sum, postscale_factor=2.0)
        a, b = fusewire.grouped_allreduce([x, x * 3])
        (y.sum() + a.sum() + b.sum() + fusewire.broadcast(x, 0).sum()).backward()
        assert torch.equal(x.grad, torch.full((3,), 7.0))

    def test_lifecycle(self):
        fusewire.init()  # does nothing
        assert (fusewire.rank(), fusewire.size(), fusewire.local_rank(), fusewire.local_size()) == (0, 1, 0, 1)
        for _ in range(3):
            fusewire.shutdown()
            assert not fusewire.is_initialized()
            with pytest.raises(fusewire.NotInitializedError, match="init"):
                fusewire.allreduce(torch.ones(1))
            with pytest.raises(fusewire.NotInitializedError):
                fusewire.rank()
            fusewire.init()
            assert fusewire.allreduce(torch.ones(1)).item() == 1.0
        fusewire.shutdown()
        with pytest.raises(ValueError, match="fusion_threshold"):
            fusewire.init(fusion_threshold=-1)

    def test_process_sets(self):
        mine = fusewire.add_process_set([0])
        assert mine.included()
        assert (mine.rank(), mine.size(), mine.ranks) == (0, 1, [0])
        assert torch.equal(fusewire.allreduce(torch.ones(1), process_set=mine), torch.ones(1))
        with pytest.raises(ValueError, match="registered already"):
            fusewire.add_process_set(mine)
        with pytest.raises(ValueError, match="only ranks"):
            fusewire.add_process_set([0, 1])


class TestStartingAlike:
    def test_objects(self):
        assert fusewire.broadcast_object({"a": (1, torch.ones(2))})["a"][0] == 1

    def test_optimizer_state_before_the_first_step(self):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
        before = [p.clone() for p in net.parameters()]
        fusewire.broadcast_optimizer_state(optimizer)
        fusewire.broadcast_parameters(net.state_dict())
        fusewire.broadcast_parameters(net.named_parameters())
        assert not optimizer.state
        assert all(p.grad is None and torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))

    def test_bad_parameters(self):
        with pytest.raises(ValueError, match="named_parameters"):
            fusewire.broadcast_parameters([model(), 1])


class TestPeriodicModelAverager:
    @pytest.mark.parametrize("period", [2, 3])
    @pytest.mark.parametrize("warmup", [0, 1, 4])
    def test_when_it_fires(self, period, warmup):
        parameter = torch.nn.Parameter(torch.ones(2))
        averager = fusewire.PeriodicModelAverager(period, warmup)
        engine = fusewire._core.get_default_engine()
        fired = []
        for step in range(10):
            assert averager.step == step
            before = engine.stats()["units"]
            averager.average_parameters([parameter])
            fired.append(engine.stats()["units"] > before)
        assert fired == [step >= warmup and (step - warmup) % period == 0 for step in range(10)]

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="period"):
            fusewire.PeriodicModelAverager(0)
        with pytest.raises(ValueError, match="warmup_steps"):
            fusewire.PeriodicModelAverager(2, -1)
        with pytest.warns(UserWarning, match="period"):
            fusewire.PeriodicModelAverager(1)
        with pytest.raises(NotImplementedError):
            fusewire.PeriodicModelAverager(2).average_parameters(["weight"])

    def test_in_place(self):
        net = model().to(torch.bfloat16)
        net[0].double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        kept = [(p, p.data_ptr(), p.dtype, p.stride()) for p in net.parameters()]
        fusewire.PeriodicModelAverager(2).average_parameters(optimizer.param_groups)
        assert all(p.data_ptr() == at and p.dtype == d and p.stride() == s for p, at, d, s in kept)
