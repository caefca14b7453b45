"""fusewire.stats(): what it counts, and that a reset forgets."""

import time

import pytest
import torch
from rank_helpers import error_of, ranks

import fusewire as fw


@ranks(2, fresh=True)
def test_every_kind_of_operation_is_counted():
    empty = fw.stats()
    assert (empty.units, empty.buckets, empty.failed) == (0, 0, 0)
    assert empty.negotiation_seconds.p95 == 0
    for _ in range(10):
        fw.allreduce(torch.ones(1000), name="x")
    fw.grouped_allreduce([torch.ones(3)] * 4, name="group")
    fw.broadcast(torch.ones(7, dtype=torch.float64), 0, name="b")
    fw.barrier()
    stats = fw.stats()
    counts = stats.operations["allreduce"]
    assert (counts.units, counts.buckets, counts.bytes) == (11, 11, 10 * 4000 + 48)
    assert stats.operations["broadcast"].bytes == 56
    assert (stats.operations["barrier"].units, stats.operations["barrier"].buckets) == (1, 0)
    assert stats.cache_hits == 9, "x, but for the first time"
    assert stats.cache_misses == 4
    assert stats.inline_buckets + stats.executor_buckets == stats.buckets == 12
    assert stats.bucket_units.count == 12
    assert 2048 <= stats.bucket_bytes.p50 <= 8192
    assert stats.negotiation_seconds.count == 13
    assert 0 <= stats.negotiation_seconds.p50 <= stats.negotiation_seconds.p95 < 10
    assert 0 < stats.data_plane_seconds < 10


@ranks(2, fresh=True)
def test_buckets_fill_and_the_latency_of_a_late_rank_shows():
    handles = [fw.allreduce_async(torch.ones(100), name=f"t{i}") for i in range(50)]
    for handle in handles:
        handle.wait()
    assert fw.stats().buckets < 50
    assert fw.stats().bucket_units.p95 > 1
    fw.stats(reset=True)
    if fw.rank() == 1:
        time.sleep(0.5)
    fw.allreduce(torch.ones(3), name="late")
    latency = fw.stats().negotiation_seconds
    assert latency.count == 1
    assert (latency.p95 > 0.2) == (fw.rank() == 0)


@ranks(2, fresh=True, init={"cache_capacity": 2})
def test_evictions_failures_and_reset():
    for i in range(5):
        fw.allreduce(torch.ones(3), name=f"t{i}")
    fw.barrier()
    assert fw.stats().cache_evictions > 0
    error_of(fw.allreduce, torch.ones(3 + fw.rank()), name="differs")
    assert fw.stats().failed == 1
    before = fw.stats(reset=True)
    assert before.units == 6
    after = fw.stats()
    assert (after.units, after.failed, after.cache_misses, after.negotiation_seconds.count) == (0, 0, 0, 0)
    assert after.operations == {}
    fw.allreduce(torch.ones(3), name="again")
    assert fw.stats().units == 1


@ranks(2)
def test_the_table_is_text_for_people():
    fw.allreduce(torch.ones(3), name="x")
    table = fw.stats().table()
    assert "allreduce" in table
    assert "negotiation p50 / p95" in table


def test_before_init_it_is_a_clear_error():
    with pytest.raises(fw.NotInitializedError):
        fw.stats()


def test_quantiles_are_those_of_the_bins():
    histogram = fw.Histogram(((1.0, 50), (2.0, 45), (8.0, 5)))
    assert (histogram.p50, histogram.p95, histogram.quantile(0.96), histogram.quantile(1)) == (1, 2, 8, 8)
    assert fw.Histogram().p50 == 0
