"""When requests that wait for a slot are taken up."""

import pytest

from rollout.sglang_patches.gathered_prefill import waits_for_slots


@pytest.mark.parametrize(
    ("running", "free", "waiting", "waits"),
    [
        (0, 64, 10, False),  # nothing runs that a pass could hold up
        (250, 6, 100, True),
        (240, 16, 100, False),
        (250, 6, 6, False),  # room for all
        (250, 6, 0, False),
        (15, 1, 100, False),  # of few, each counts
    ],
)
def test_a_sixteenth_of_the_slots_or_as_many_as_are_wanted(running, free, waiting, waits):
    assert waits_for_slots(running, free, waiting) is waits
