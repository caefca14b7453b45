"""Tests on real ranks: `@ranks(2, 3)` runs the body of a test on every rank of a job of two and of three processes.

Whatever the body returns must be bitwise equal on all ranks. Asserts in it work as anywhere, and a failure names its
rank. Keywords: `timeout` (seconds), `fresh=True` (shutdown and init around it, for bodies that break the engine),
`init={...}` (keywords of that init) and `cuda=True` (ranks that have a GPU: a real one, or the stand-in fake_cuda,
which also finds every wait between streams that is missing). Those are marked `cuda`: `-m cuda` runs them alone.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "python"))  # what tests import, their ranks too

import cloudpickle
import jobs
import pytest
import rank_pool


def pytest_addoption(parser):
    parser.addoption("--cuda", action="store_true", help="ranks make their tensors on the GPU, or on the stand-in")


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(*sizes, timeout, fresh, init, cuda): run the body on that many ranks")
    config.addinivalue_line("markers", "cuda: on ranks with a GPU, or with the stand-in")


def pytest_itemcollected(item):
    marker = item.get_closest_marker("ranks")
    if marker and marker.kwargs.get("cuda"):
        item.add_marker("cuda")


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker:
        metafunc.fixturenames.insert(0, "world_size")
        metafunc.parametrize("world_size", marker.args, ids=[f"n{size}" for size in marker.args])


def pytest_collection_modifyitems(items):
    # A rank cannot import a test module (its directory is no package, pytest has rewritten its asserts): send its
    # functions themselves.
    def runs_elsewhere(item):
        return item.get_closest_marker("ranks") or "launcher" in item.fixturenames

    for name in {item.module.__name__ for item in items if hasattr(item, "module") and runs_elsewhere(item)}:
        cloudpickle.register_pickle_by_value(sys.modules[name])


@pytest.fixture(scope="session")
def pools():
    pools = rank_pool.Pools()
    yield pools
    pools.close()


@pytest.fixture(autouse=True)
def _start_pools(request):
    if request.node.get_closest_marker("ranks"):
        request.getfixturevalue("pools")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    values = dict(pyfuncitem.funcargs)
    pool = values["pools"] if "pools" in values else pyfuncitem._request.getfixturevalue("pools")
    size = pyfuncitem.callspec.params["world_size"]
    keywords = {name: values[name] for name in pyfuncitem._fixtureinfo.argnames if name != "world_size"}
    options = dict(marker.kwargs)
    cuda = "default" if pyfuncitem.config.getoption("--cuda") else options.pop("cuda", False)
    options.pop("cuda", None)
    text = None
    try:
        rank_pool.run_equal(pool.get(size, cuda), pyfuncitem.obj, (), keywords, **options)
    except rank_pool.RankFailure as failure:
        text = str(failure)
    if text is not None:  # outside the except block, so that pytest shows nothing else
        pytest.fail(text, pytrace=False)
    return True


@pytest.fixture(scope="session")
def launcher():
    """Starts throw-away jobs, see jobs.py."""
    launcher = jobs.Launcher()
    yield launcher
    launcher.close()
