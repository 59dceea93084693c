"""Cases that are computed together, in one set of processes."""

from typing import Any

import pytest


def chosen(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """What the parameters `names` are in those tests of the module that are to run, so that a fixture of the module
    computes nothing else."""
    here = [item for item in request.session.items if item.path == request.path]
    parameters = [
        item.callspec.params for item in here if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    return {tuple(one[name] for name in names) for one in parameters if set(names) <= one.keys()}
