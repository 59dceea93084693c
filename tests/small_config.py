"""The smallest configuration of a run that can be read, for tests that change parts of it."""

from typing import Any

from rlpipe.config.load import validate
from rlpipe.config.root import Config

_TREE = {
    "run": {"name": "r", "iterations": 1},
    "model": {"path": "none"},
    "data": {"train": [{"name": "t", "path": "t.jsonl"}]},
}


def small_config(**sections: Any) -> Config:
    """With `sections` in it, each in the place of the whole one."""
    return validate(_TREE | sections, "test")
