"""Which cases of a test are among the slow ones."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow(values: Sequence[Any]) -> list[Any]:
    """Values of a test's parameter that are among the slow ones."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
