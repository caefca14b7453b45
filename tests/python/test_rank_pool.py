"""The pool that other tests run on: who may leave when, and what it says when a rank fails."""

import time

import pytest
import rank_pool
import torch
from rank_helpers import ranks

import fusewire as fw


@ranks(3, fresh=True)
def test_ranks_that_end_early_stay_until_the_last_has_ended():
    """Rank 0 leads: without it the other two cannot agree on anything."""
    pair = fw.add_process_set([1, 2])
    if fw.rank() != 0:
        time.sleep(0.5)  # by now rank 0 has left, if it may
        assert fw.allreduce(torch.ones(2), op=fw.Sum, process_set=pair).tolist() == [2.0, 2.0]


def rank_1_fails():
    if fw.rank() == 1:
        raise ValueError("the body fails here")
    return torch.ones(1)


def test_a_failure_is_reported_at_once_although_others_have_ended(pools):
    with pytest.raises(rank_pool.RankFailure, match="the body fails here") as caught:
        pools.get(2).run(rank_1_fails, fresh=True)
    assert "rank 1 of 2 failed" in str(caught.value)
    assert "had not ended" not in str(caught.value), "rank 0 has ended, and waits for nobody"
