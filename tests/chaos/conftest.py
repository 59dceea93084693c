"""Runs that nothing disturbs, to compare with: one for each kind of them in a session."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.chaos.chaos_support import DisturbedRun, disturbed_run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DisturbedRun]:
    """Of a run with the given settings, made when it is first asked for."""

    @cache
    def run(*settings: str) -> DisturbedRun:
        done = disturbed_run(tmp_path_factory.mktemp("undisturbed"), [], *settings)
        assert done.code == 0, done.output
        return done

    return run
