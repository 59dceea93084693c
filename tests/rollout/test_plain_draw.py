"""Which batches of an engine on a GPU the kernels of our own draw from; the kernels themselves: tests/gpu."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.sglang_patches.plain_draw import draws_plainly

PLAIN = {
    "need_top_k_sampling": False,
    "need_top_p_sampling": False,
    "need_min_p_sampling": False,
    "is_all_greedy": False,
    "sampling_seed": None,
    "return_sampling_masks": None,
}
SAMPLER = {"enable_deterministic": False, "use_ascend_backend": False}


def _draws_plainly(**changes: Any) -> bool:
    batch = SimpleNamespace(**{name: changes.get(name, value) for name, value in PLAIN.items()})
    sampler = SimpleNamespace(**{name: changes.get(name, value) for name, value in SAMPLER.items()})
    return draws_plainly(sampler, batch)


def test_a_batch_that_leaves_nothing_out_and_has_no_seeds_is_drawn_plainly():
    assert _draws_plainly()
    assert _draws_plainly(return_sampling_masks=[False, False])


@pytest.mark.parametrize(
    "change",
    [
        {"need_top_k_sampling": True},
        {"need_top_p_sampling": True},
        {"need_min_p_sampling": True},
        {"is_all_greedy": True},
        {"sampling_seed": torch.tensor([1, 2])},
        {"return_sampling_masks": [False, True]},
        {"enable_deterministic": True},
        {"use_ascend_backend": True},
    ],
    ids=str,
)
def test_any_other_batch_is_sglang_s(change):
    assert not _draws_plainly(**change)
