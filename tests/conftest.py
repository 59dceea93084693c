"""Where tests run if pytest has several workers: files stay whole, and engine tests share one pool of engines."""

from typing import Any

import pytest

# Long ones first, so that no worker is left alone with one of them at the end.
_FIRST = ("tests/rollout/", "tests/rlpipe/test_rollouts_end", "tests/rlpipe/test_train_end", "tests/actor/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((at for at, start in enumerate(_FIRST) if item.nodeid.startswith(start)), 99))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _FIRST[0] if nodeid.startswith(_FIRST[0]) else nodeid.split("::", 1)[0]

    return WholeFiles(config, log)
