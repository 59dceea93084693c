"""docs/algorithms.md: its example runs, and it names every advantage, loss and setting there is."""

import doctest
from pathlib import Path

from rlpipe.config.algorithm import ADVANTAGES, LOSSES, AlgorithmConfig, CorrectionConfig, OverlongConfig

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_example_runs():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 5
    assert result.failed == 0


def test_every_name_is_explained():
    text = PAGE.read_text()
    names = [*ADVANTAGES, *LOSSES, *CorrectionConfig.model_fields, *OverlongConfig.model_fields]
    names += AlgorithmConfig.model_fields
    assert [name for name in names if f"`{name}" not in text and f".{name}" not in text] == []
