"""What runs where when pytest has several workers: files stay whole, and all engine tests share one pool of engines."""

import pytest


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group("rollout" if folder == "rollout" else item.path.name))
