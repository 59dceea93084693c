"""A long run keeps the memory that it has."""

import pytest

from tests.chaos.memory_growth import growing_run, growth

ITERATIONS = 200
SETTLED = 110
"""After the save in iteration 100, the second: what it takes the C library maps at first and keeps from then on."""

MEGABYTES = 20
"""A leak of an eightieth of this in an iteration is seen; allocators keep some more for a while."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_process_grows_from_iteration_to_iteration(tmp_path):
    sizes = dict(growing_run(tmp_path, ITERATIONS))
    grown = growth(sizes, SETTLED, ITERATIONS - 10)  # while all of it runs
    assert {"driver", "engine", "scheduler", "actor", "grader"} <= set(grown)
    assert {role: size for role, size in grown.items() if size > MEGABYTES} == {}
