"""docs/migration.md: every public name of horovod.torch has a line there, and every line is true."""

import inspect
from pathlib import Path

import pytest

import fusewire as fw

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
SET = ("process_set",)
SCALES = ("prescale_factor", "postscale_factor")
REDUCE = ("average", "name", "op", *SCALES, *SET)
SCATTER = ("name", "op", *SET, *SCALES)

# Horovod 0.28: the name, and its parameters where it is a function.
HOROVOD: dict[str, tuple[str, ...] | None] = {
    "init": ("comm", "process_sets"),
    **dict.fromkeys(["shutdown", "is_initialized", "rank", "size", "local_rank", "local_size"], ()),
    **dict.fromkeys(["cross_rank", "cross_size", "is_homogeneous", "mpi_threads_supported", "mpi_enabled"], ()),
    **dict.fromkeys(["mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built", "ccl_built"], ()),
    **dict.fromkeys(["cuda_built", "rocm_built", "stop_timeline"], ()),
    "start_timeline": ("file_path", "mark_cycles"),
    **dict.fromkeys(["Average", "Sum", "Adasum", "Min", "Max", "Product"]),
    "allreduce": ("tensor", "average", "name", "compression", "op", *SCALES, *SET),
    **dict.fromkeys(["allreduce_", "allreduce_async", "allreduce_async_"], ("tensor", *REDUCE)),
    "grouped_allreduce": ("tensors", "average", "name", "compression", "op", *SCALES, *SET),
    **dict.fromkeys(
        ["grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"], ("tensors", *REDUCE)
    ),
    "sparse_allreduce_async": ("tensor", "name", "op", *SET),
    **dict.fromkeys(["allgather", "allgather_async"], ("tensor", "name", *SET)),
    **dict.fromkeys(["grouped_allgather", "grouped_allgather_async"], ("tensors", "name", *SET)),
    **dict.fromkeys(
        ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"], ("tensor", "root_rank", "name", *SET)
    ),
    **dict.fromkeys(["alltoall", "alltoall_async"], ("tensor", "splits", "name", *SET)),
    "reducescatter": ("tensor", "name", "compression", "op", *SET, *SCALES),
    "reducescatter_async": ("tensor", *SCATTER),
    "grouped_reducescatter": ("tensors", "name", "compression", "op", *SET, *SCALES),
    "grouped_reducescatter_async": ("tensors", *SCATTER),
    "join": ("device",),
    "barrier": SET,
    "synchronize": ("handle",),
    "poll": ("handle",),
    "ProcessSet": None,
    "global_process_set": None,
    "add_process_set": SET,
    "remove_process_set": SET,
    "Compression": None,
    "DistributedOptimizer": (
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "num_groups",
        "groups",
        "sparse_as_dense",
        *SET,
    ),
    "broadcast_parameters": ("params", "root_rank"),
    "broadcast_optimizer_state": ("optimizer", "root_rank", "model"),
    "broadcast_object": ("obj", "root_rank", "name", *SET),
    "allgather_object": ("obj", "name"),
    "SyncBatchNorm": ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    "HorovodInternalError": None,
    "elastic": None,
    "elastic.run": None,
    "elastic.TorchState": None,
    "elastic.ElasticSampler": None,
    "check_extension": None,
    "gpu_available": None,
}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


ROWS = {name.strip("`"): (status, note) for name, status, note in table("Names")}


def has(name: str) -> bool:
    value = fw
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def test_every_name_has_one_line():
    assert list(ROWS) == list(dict.fromkeys(ROWS))
    assert len(table("Names")) == len(ROWS)
    assert sorted(ROWS) == sorted(HOROVOD)


@pytest.mark.parametrize("name", HOROVOD)
def test_the_line_is_true(name):
    status, note = ROWS[name]
    assert status in ("same", "differs", "not here")
    if status == "not here":
        assert not has(name)
        assert note
        return
    assert has(name)
    assert "." in name or name in fw.__all__
    if status == "differs":
        assert note
    parameters = HOROVOD[name]
    if status != "same" or parameters is None:
        return
    ours = inspect.signature(getattr(fw, name)).parameters.values()
    positional = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(positional[: len(parameters)]) == parameters
    more = [p for p in ours if p.name not in parameters]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in more)


def test_compression_has_horovods():
    assert fw.Compression.none
    assert fw.Compression.fp16


@pytest.mark.parametrize("row", table("Environment"), ids=lambda row: row[0].strip("`"))
def test_the_variables(row, monkeypatch):
    """A bad value is refused under Horovod's name, and not looked at where ours is set."""
    theirs, ours = (cell.strip("`") for cell in row)
    name, _, value = ours.partition("=")
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(theirs, "no such value")
    if theirs != "HOROVOD_TIMELINE":  # any text is a path
        with pytest.raises(ValueError, match=f"{theirs}=no such value"):
            fw._core.check_config({})
    good = "info" if "LEVEL" in name else "1"
    monkeypatch.setenv(theirs, good)
    fw._core.check_config({})
    monkeypatch.setenv(name, value or good)
    if theirs != "HOROVOD_STALL_CHECK_DISABLE":
        monkeypatch.setenv(theirs, "no such value")
    fw._core.check_config({})
