"""A cluster on this machine that loses one of Ray's own processes, or is interrupted while it starts."""

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from run_support import MARK, PROJECT, assert_no_process_is_left

from rlpipe.shared.interrupts import INTERRUPTED
from rlpipe.shared.socket_folder import LONGEST_BYTES
from rlpipe.training import ray_watch
from rlpipe.training.ray_watch import RayWatch, SystemProcess
from tests.search_path import search_path

SCRIPT = """
import sys, time
import typer
from rlpipe.commands.environment import set_defaults
from rlpipe.commands.user_errors import one_sentence
from rlpipe.shared import interrupts

victim = sys.argv[1:2]

def last_words():
    yield "; last checkpoint: none"
    print("an engine died, says another thread", flush=True)
    yield "; more"

def command():
    with one_sentence(debug=False):
        print("signals are handled", flush=True)
        with_ray()

def with_ray():
    import psutil
    import ray
    from rlpipe.config.load import load_config
    from rlpipe.training.ray_cluster import ray_cluster

    @ray.remote
    class Sleeper:
        def sleep(self, seconds):
            time.sleep(seconds)

    config = load_config("configs/demo/arithmetic.yaml", ["ray.cpus=2", "ray.object_store_bytes=100000000"])
    with ray_cluster(config, last_words):
        sleeper = Sleeper.remote()
        ray.get(sleeper.sleep.remote(0))
        for child in psutil.Process().children():
            if [child.name()] == victim:
                child.kill()
        while sys.argv[2:]:
            ray.put(bytes(2**20))
        ray.get(sleeper.sleep.remote(200))

set_defaults()
interrupts.install()
as_program = typer.Typer()  # which makes exit codes of what a command raises
as_program.command()(command)
as_program(args=[])
"""


SILENT_RAY = """
import threading
from rlpipe.commands.environment import set_defaults
set_defaults()
import ray._private.worker as worker
from rlpipe.commands.user_errors import one_sentence
from rlpipe.config.load import load_config
from rlpipe.training.ray_cluster import ray_cluster

worker.connect = lambda *arguments, **keywords: threading.Event().wait()
config = load_config(
    "configs/demo/arithmetic.yaml",
    ["ray.cpus=1", "ray.object_store_bytes=100000000", "deadlines.start_seconds=15"],
)
with one_sentence(debug=False), ray_cluster(config):
    print("not reached")
"""

OWN_RAY = """
from rlpipe.commands.environment import set_defaults
set_defaults()
from rlpipe.config.load import load_config
from rlpipe.training.ray_cluster import ray_cluster

config = load_config("configs/demo/arithmetic.yaml", ["ray.cpus=1", "ray.object_store_bytes=100000000"])
with ray_cluster(config):
    print("a cluster of its own")
"""


def run_script(
    *arguments: str, script: str = SCRIPT, ended_after_seconds: float | None = None, **environment: str
) -> tuple[int, str]:
    """Exit code and output; where it is ended, by a SIGTERM from outside."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=PROJECT,
        env={**os.environ, MARK: mark, "PYTHONPATH": search_path(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended_after_seconds is not None:
        time.sleep(ended_after_seconds)
        process.terminate()
    output, _ = process.communicate(timeout=300)
    assert_no_process_is_left(mark)
    return process.returncode, output


@pytest.mark.parametrize(
    ("process", "name", "meanwhile"),
    [
        ("raylet", "raylet", ("storing objects",)),
        pytest.param("raylet", "raylet", (), marks=pytest.mark.slow),
        pytest.param("gcs_server", "GCS", (), marks=pytest.mark.slow),
    ],
)
def test_a_lost_process_of_ray_is_one_sentence(process: str, name: str, meanwhile: tuple[str, ...]) -> None:
    code, output = run_script(process, *meanwhile)
    assert code == 2, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert sentence.startswith(f"error: ray: the {name} of this machine (pid ")
    assert "it was ended by SIGKILL" in sentence
    assert sentence.endswith("; last checkpoint: none; more")
    assert "Traceback" not in output
    assert "state-dump" not in output


@pytest.mark.slow
def test_ray_is_held_also_where_its_environment_is_reached_by_a_link(tmp_path: Path) -> None:
    """Without, it ended the run with exit code 1 and not a word."""
    packages = Path(ray.__file__).resolve().parents[1]
    (tmp_path / "linked").symlink_to(packages)
    code, output = run_script(
        "raylet", "storing objects", PYTHONPATH=f"{search_path()}{os.pathsep}{tmp_path / 'linked'}"
    )
    assert code == 2, output
    assert "error: ray: the raylet of this machine (pid " in output


@pytest.mark.slow
def test_a_library_that_cannot_be_held_is_told() -> None:
    """So that an upgrade of Ray does not take the sentence away in silence."""
    not_found = "import rlpipe.training.ray_exit as ray_exit\nray_exit._slot_of = lambda name, library: None\n"
    code, output = run_script(script=not_found + OWN_RAY)
    assert code == 0 and f"ray {ray.__version__}: where its library ends this process was not found" in output, output
    assert "was not found" not in run_script(script=OWN_RAY)[1]


@pytest.mark.slow
def test_a_cluster_that_is_not_named_is_not_joined() -> None:
    """Ray by itself takes the address of the environment, or of the cluster that was started last on this machine."""
    code, output = run_script(script=OWN_RAY, RAY_ADDRESS="192.0.2.1:6379")
    assert code == 0 and "a cluster of its own" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 60])
def test_a_cluster_starts_whatever_the_length_of_the_temporary_folder(more: int) -> None:
    """With the longest path that is kept, and with one that Ray's sockets cannot have, as batch systems give a job."""
    folder = Path(f"/tmp/{os.getpid()}-".ljust(LONGEST_BYTES + more, "x"))
    folder.mkdir(exist_ok=True)
    try:
        code, output = run_script(script=OWN_RAY, TMPDIR=str(folder))
        assert code == 0 and "a cluster of its own" in output, output
        assert (folder / "ray").is_dir() == (more == 0)
        assert ("too long" in output) == (more > 0)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6])
def test_a_signal_while_ray_starts_leaves_nothing(seconds: float) -> None:
    code, output = run_script(ended_after_seconds=seconds)
    assert code == 130 or (code and "signals are handled" not in output), output
    if "signals are handled" in output:  # Ray's library may have printed where the signal met it, while it connected
        assert output.endswith(f"{INTERRUPTED}\n"), output


@pytest.mark.slow
def test_ray_that_never_answers_is_not_waited_for_without_end() -> None:
    """Its library waits in C++; here Python does in its place."""
    code, output = run_script(script=SILENT_RAY)
    assert code == 2 and "not reached" not in output, output
    assert "error: ray: it started on this machine and did not answer within 30 seconds" in output


def test_a_process_of_ray_that_is_stopped_now_and_then_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stopped = 0.0, False
    monkeypatch.setattr(ray_watch, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(ray_watch, "is_stopped", lambda pid: stopped)
    monkeypatch.setattr(ray_watch, "end_of", lambda pid: None)
    watch = RayWatch("127.0.0.1:1", [SystemProcess("raylet", os.getpid(), Path("/logs"))], tuple)
    for now, stopped in ((0.0, True), (9.0, False), (18.0, True), (27.0, True)):  # noqa: B007
        assert watch._cause() is None
    now = 28.5
    assert "it was stopped by a signal" in str(watch._cause())


def test_a_head_elsewhere_is_lost_when_it_does_not_answer_four_times_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = True

    def connect(address: tuple[str, int], timeout: float) -> SimpleNamespace:
        if not answers:
            raise OSError
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(ray_watch, "socket", SimpleNamespace(create_connection=connect))
    watch, found = RayWatch("head:6379", [], tuple), []
    for answers in (False, False, False, True, False, False, False, False):  # noqa: B007
        found.append(watch._cause())
    assert found == [None] * 7 + ["no GCS answers at head:6379 any more"]
