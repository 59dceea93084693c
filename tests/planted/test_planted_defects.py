"""Would the suite see it? Each planted defect has to turn its test red. `make planted` prints the score."""

import ast

import pytest
from defects import DEFECTS
from planting import PROJECT, run_with


def test_every_defect_fits_the_code_and_names_a_test_that_exists():
    assert len(DEFECTS) >= 40 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    for defect in DEFECTS:
        assert defect.source.count(defect.old) == 1, f"{defect.name}: adapt it to {defect.file}"
        assert ast.dump(ast.parse(defect.source.replace(defect.old, defect.new))) != ast.dump(ast.parse(defect.source))
        path, _, function = defect.test.partition("::")
        assert not function or f"def {function}(" in (PROJECT / "tests" / path).read_text(), defect.test


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name.replace(" ", "-"))
def test_a_planted_defect_turns_its_test_red(defect, tmp_path):
    outcome = run_with(defect, tmp_path)
    assert outcome.planted, f"no process imported {defect.module}\n{outcome.output[-2000:]}"
    assert outcome.failed, f"{defect.test} does not see it\n{outcome.output[-2000:]}"
