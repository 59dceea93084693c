"""Where processes that tests start look for modules."""

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]


def search_path(*first: Path) -> str:
    """PYTHONPATH with `first` and the project in front; packages may be where only the caller's own path leads."""
    return os.pathsep.join(filter(None, [*map(str, first), str(PROJECT), os.environ.get("PYTHONPATH")]))
