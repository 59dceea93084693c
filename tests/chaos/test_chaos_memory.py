"""A long run keeps the memory that it has."""

import pytest

from tests.chaos.memory_growth import growing_run, growth

ITERATIONS = 200
MEGABYTES = 20
"""A leak of a hundredth of this in an iteration is seen; allocators keep some more for a while."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_process_grows_from_iteration_to_iteration(tmp_path):
    sizes = dict(growing_run(tmp_path, ITERATIONS))
    grown = growth(sizes, ITERATIONS // 2, ITERATIONS - 10)  # while all of it runs
    assert {"driver", "engine", "scheduler", "actor", "grader"} <= set(grown)
    assert {role: size for role, size in grown.items() if size > MEGABYTES} == {}
