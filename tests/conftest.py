"""Where tests run if pytest has several workers: files stay whole, and engine tests share one pool of engines. Planted
defects alone are shared out one by one."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from rlpipe.commands.environment import set_defaults
from rlpipe.config.load import load_config

set_defaults()
# A fast example takes long where the machine is busy; and a test fails by its first error, as others do.
settings.register_profile(
    "any load", deadline=None, suppress_health_check=[HealthCheck.too_slow], report_multiple_bugs=False
)
settings.load_profile("any load")
for support in Path(__file__).parent.glob("*/*_support.py"):  # so that their assertions tell what they compared, too
    pytest.register_assert_rewrite(support.stem, f"tests.{support.parent.name}.{support.stem}")

# Long ones first, so that no worker is left alone with one of them at the end.
_FIRST = (
    "tests/rollout/",
    "tests/rlpipe/test_rollouts_end",
    "tests/rlpipe/test_train_end",
    "tests/rlpipe/test_supervised_end",
    "tests/rlpipe/test_strangers",
    "tests/rlpipe/test_phase_times",
    "tests/actor/",
)

# Each starts a process of its own, so that two workers share them; in one they would take an hour.
_APART = "tests/planted/test_planted_defects.py::test_a_planted_defect"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and tests within a file, in random order")
    parser.addoption("--part", metavar="K/N", help="every N-th test in that order, from the K-th on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _order(items, config.getoption("--shuffle"))
    if part := config.getoption("--part"):
        which, parts = (int(number) for number in part.split("/"))
        if not 1 <= which <= parts:
            raise pytest.UsageError(f"--part {part}: parts are 1/{parts} to {parts}/{parts}")
        config.hook.pytest_deselected(items=[item for at, item in enumerate(items) if at % parts != which - 1])
        items[:] = items[which - 1 :: parts]


def _order(items: list[pytest.Item], seed: int | None) -> None:
    if seed is None:
        items.sort(key=lambda item: next((at for at, start in enumerate(_FIRST) if item.nodeid.startswith(start)), 99))
        return
    numbers = random.Random(seed)
    files = list(dict.fromkeys(item.nodeid.split("::")[0] for item in items))
    numbers.shuffle(files)
    numbers.shuffle(items)
    items.sort(key=lambda item: files.index(item.nodeid.split("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(_APART):
                return nodeid
            return _FIRST[0] if nodeid.startswith(_FIRST[0]) else nodeid.split("::", 1)[0]

    return WholeFiles(config, log)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray cluster for all tests of this process that need no cluster of their own."""
    from rlpipe.training.ray_cluster import ray_cluster

    demo = Path(__file__).parent.parent / "configs/demo/arithmetic.yaml"
    with ray_cluster(load_config(demo, ["ray.cpus=4", f"ray.object_store_bytes={100 * 2**20}"])):
        yield
