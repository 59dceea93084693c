"""Compiled modules are kept, also where Python is told to leave none beside their sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.commands.doctor import machine
from rlpipe.commands.doctor.check import Status
from rlpipe.shared import bytecode
from tests.search_path import search_path

PROJECT = Path(__file__).parents[2]
NODES = PROJECT / "tests/doctor/two_ray_nodes.py"
OTHER_PROCESS = """
from rlpipe.commands.environment import set_defaults
set_defaults()
import subprocess, sys
import here
subprocess.run([sys.executable, "-c", "import below"], check=True)
"""
WORKER = """
import sys
from rlpipe.commands.environment import set_defaults
set_defaults()
import ray
from rlpipe.config.load import load_config
from rlpipe.training.ray_cluster import ray_cluster

@ray.remote(num_cpus=0)
def import_here():
    import here

@ray.remote(num_cpus=0, runtime_env={"env_vars": {"OF_THE_ENGINE": "1"}})
def import_below():
    import multiprocessing
    import below
    process = multiprocessing.get_context("spawn").Process(target=below.imported)
    process.start()
    process.join()
    assert process.exitcode == 0

settings = ["ray.cpus=2", "ray.object_store_bytes=100000000", *sys.argv[1:]]
with ray_cluster(load_config("configs/demo/arithmetic.yaml", settings)):
    ray.get([import_here.remote(), import_below.remote()])
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "here.py").write_text("")
    (folder / "below.py").write_text("def imported():\n    import further\n")
    (folder / "further.py").write_text("")
    return folder


def _environment(modules: Path, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join([str(modules), search_path()])
    return {**inherited, "HOME": str(modules.parent), "PYTHONPATH": path, **variables}


def _run(script: str, *arguments: str, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", script, *arguments]
    subprocess.run(command, env=environment, cwd=PROJECT, check=True, timeout=300)


def _kept_names(folder: Path) -> set[str]:
    return {path.name.split(".")[0] for path in folder.rglob("*.pyc")}


def test_compiled_modules_are_kept_elsewhere_where_they_must_not_lie_beside_their_sources(modules):
    _run(OTHER_PROCESS, environment=_environment(modules, PYTHONDONTWRITEBYTECODE="1"))
    assert _kept_names(modules) == set()
    kept = _kept_names(modules.parent / ".cache/rlpipe/bytecode")
    assert {"here", "below"} <= kept


@pytest.mark.parametrize("variable", ["", "PYTHONPYCACHEPREFIX"])
def test_what_the_user_has_said_of_their_place_holds(modules, variable):
    mine = modules.parent / "mine"
    forbidden = {"PYTHONDONTWRITEBYTECODE": "1", variable: str(mine)} if variable else {}
    _run(OTHER_PROCESS, environment=_environment(modules, **forbidden))
    assert {"here", "below"} <= _kept_names(mine if variable else modules)
    assert not (modules.parent / ".cache").exists()


@pytest.mark.slow
@pytest.mark.parametrize("joined", [False, True])
def test_workers_keep_what_they_compile(modules, joined):
    environment = _environment(modules, PYTHONDONTWRITEBYTECODE="1", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64)
    if joined:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, str(NODES)], env=environment, cwd=PROJECT, **pipes) as nodes:
            address = nodes.stdout.readline().strip()
            _run(WORKER, f"ray.address={address}", "ray.nodes=2", environment=environment)
            nodes.stdin.close()
    else:
        _run(WORKER, environment=environment)
    assert _kept_names(modules) == set()
    assert {"here", "below", "further"} <= _kept_names(modules.parent / ".cache/rlpipe/bytecode")


def test_a_user_without_a_home_may_run_all_the_same(monkeypatch):
    def unknown(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    before = sys.pycache_prefix, sys.dont_write_bytecode
    bytecode.keep_bytecode()
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
    assert bytecode.bytecode_environment() == {}


def test_variables_that_are_empty_are_as_if_they_were_not_there(modules, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    bytecode.keep_bytecode()
    assert bytecode.bytecode_environment() == {}
    _run(OTHER_PROCESS, environment=_environment(modules, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=""))
    assert {"here", "below"} <= _kept_names(modules.parent / ".cache/rlpipe/bytecode")


def test_the_doctor_tells_where_compiled_modules_are_kept(tmp_path, monkeypatch):
    def told() -> tuple[Status, str]:
        (check,) = (check for check in machine.check_machine(tmp_path) if check.name == "compiled modules")
        return check.status, check.found

    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    assert told() == (Status.OK, f"kept below {tmp_path / 'kept'}")
    monkeypatch.setattr(sys, "pycache_prefix", "/proc/no-such-folder")
    assert told() == (Status.WARN, "/proc cannot be written")
