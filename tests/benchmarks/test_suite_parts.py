"""Parts of the suite hold every test once, and what shares a fixture stays together."""

import pytest

from tests.suite_parts import part_of, unit_of

TESTS = [
    *(f"tests/actor/test_{file}.py::test_{n}" for file in "abcde" for n in range(3)),
    *(f"tests/rollout/test_{file}.py::test_it" for file in "ab"),
    *(f"tests/planted/test_planted_defects.py::test_a_planted_defect[{n}]" for n in range(4)),
    "tests/planted/test_planted_defects.py::test_another",
    *(f"tests/chaos/test_chaos_disk.py::test_{n}" for n in range(4)),
]


@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_every_test_is_in_one_part(parts):
    taken = [part_of(TESTS, which, parts) for which in range(1, parts + 1)]
    assert sorted(test for part in taken for test in part) == sorted(TESTS)
    assert max(map(len, taken)) < len(TESTS) or parts == 1


def test_files_and_tests_of_engines_stay_together():
    units = [unit_of(test) for test in TESTS]
    assert len(set(units)) == 5 + 1 + 4 + 1 + 4
    for which in (1, 2, 3):
        part = part_of(TESTS, which, 3)
        kept = {unit for test, unit in zip(TESTS, units, strict=True) if test in part}
        assert part == {test for test, unit in zip(TESTS, units, strict=True) if unit in kept}
