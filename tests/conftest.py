"""Where and in which order tests run, if pytest has several workers (tests/suite_parts.py), too."""

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from rlpipe.commands.environment import set_defaults
from rlpipe.config.load import load_config
from tests.suite_parts import ENGINES, part_of, unit_of

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
    ENGINES,
    "tests/rlpipe/test_rollouts_end",
    "tests/rlpipe/test_train_end",
    "tests/rlpipe/test_supervised_end",
    "tests/rlpipe/test_strangers",
    "tests/rlpipe/test_phase_times",
    "tests/actor/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and tests within a file, in random order")
    parser.addoption("--part", metavar="K/N", help="every N-th file, from the K-th on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((at for at, start in enumerate(_FIRST) if item.nodeid.startswith(start)), 99))
    if part := config.getoption("--part"):  # of the usual order, in which long files are dealt out evenly
        which, parts = (int(number) for number in part.split("/"))
        if not 1 <= which <= parts:
            raise pytest.UsageError(f"--part {part}: parts are 1/{parts} to {parts}/{parts}")
        taken = part_of([item.nodeid for item in items], which, parts)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in taken])
        items[:] = [item for item in items if item.nodeid in taken]
    if (seed := config.getoption("--shuffle")) is not None:
        _shuffle(items, random.Random(seed))


def _shuffle(items: list[pytest.Item], numbers: random.Random) -> None:
    files = list(dict.fromkeys(item.nodeid.split("::")[0] for item in items))
    numbers.shuffle(files)
    numbers.shuffle(items)
    items.sort(key=lambda item: files.index(item.nodeid.split("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Modules and tests stay to the end: the collector need not walk through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return WholeFiles(config, log)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray cluster for all tests of this process that need no cluster of their own."""
    from rlpipe.training.ray_cluster import ray_cluster

    demo = Path(__file__).parent.parent / "configs/demo/arithmetic.yaml"
    with ray_cluster(load_config(demo, ["ray.cpus=4", f"ray.object_store_bytes={100 * 2**20}"])):
        yield
