"""The processes that tests of several ranks run in (`train_support.run_processes`)."""

import time

from train_support import run_processes


def test_a_rank_that_is_done_leaves_when_all_are():
    """Otherwise it closes connections that a slower rank is still making, or takes rank 0's store away."""
    assert run_processes(2, _late_user_of_the_store) == [1, 2]


def _late_user_of_the_store(rank: int, count: int) -> int:
    from torch.distributed import distributed_c10d

    time.sleep(2.0 * rank)
    return distributed_c10d._get_default_store().add("users", 1)
