"""What of the suite runs in one process, and what of it is a part that runs by itself."""

from collections.abc import Sequence

ENGINES = "tests/rollout/"

# Each test of these starts processes of its own, so that workers share them; in one they would take an hour.
_APART = ("tests/planted/test_planted_defects.py::test_a_planted_defect", "tests/chaos/")


def unit_of(test: str) -> str:
    """Tests of one unit stay together, because they share what takes long to set up: those of a file, and those of
    engines, which share a pool. test: its id, `tests/.../test_x.py::test_y[case]`."""
    if test.startswith(_APART):
        return test
    return ENGINES if test.startswith(ENGINES) else test.split("::", 1)[0]


def part_of(tests: Sequence[str], which: int, parts: int) -> set[str]:
    """Every `parts`-th unit of `tests` in their order, from number `which` on, which counts from 1."""
    units = list(dict.fromkeys(map(unit_of, tests)))
    taken = set(units[which - 1 :: parts])
    return {test for test in tests if unit_of(test) in taken}
