"""Joining a cluster whose head is slow, or does not take us."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from run_support import PROJECT

from tests.search_path import search_path

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# Ray waits 60 seconds for a raylet, and asks a head twenty times.
IMPATIENT = {"RAY_gcs_server_request_timeout_seconds": "3", "RAY_NUM_REDIS_GET_RETRIES": "1"}
JOIN = """
import sys
from rlpipe.commands.environment import set_defaults
set_defaults()
import typer
from rlpipe.commands.user_errors import one_sentence
from rlpipe.config.load import load_config
from rlpipe.training.ray_cluster import ray_cluster

def command():
    with one_sentence(debug=False):
        config = load_config("configs/demo/arithmetic.yaml", settings)
        with ray_cluster(config):
            print("joined")

settings = sys.argv[1:]
as_program = typer.Typer()  # which makes exit codes of what a command raises
as_program.command()(command)
as_program(args=[])
"""


@contextmanager
def _head() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A head on this machine, which may take long for its raylet, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="rlpipe-", dir="/tmp") as folder:  # short: names of sockets lie below it
        command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--num-cpus=1"]
        places = [f"--port={address.split(':')[1]}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
        head = subprocess.Popen(
            [*command, *places, "--include-dashboard=false", f"--object-store-memory={100 * 2**20}"],
            env={**os.environ, **TOKEN, "RAY_raylet_start_wait_time_s": "300"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield head, address
        finally:
            below = psutil.Process(head.pid).children(recursive=True)
            for process in [*below, head]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            head.wait(60)
            psutil.wait_procs(below, timeout=60)


def _raylet_of(head: subprocess.Popen[bytes]) -> psutil.Process:
    """As soon as it is there."""
    end = time.monotonic() + 120
    while time.monotonic() < end and head.poll() is None:
        for process in psutil.Process(head.pid).children():
            with suppress(psutil.NoSuchProcess):
                if process.name() == "raylet":
                    return process
        time.sleep(0.01)
    raise AssertionError("the head started no raylet")


def _join(address: str, *settings: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, f"ray.address={address}", *settings],
        cwd=PROJECT,
        env={**os.environ, **TOKEN, **IMPATIENT, "PYTHONPATH": search_path(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_head_whose_raylet_comes_late_is_joined() -> None:
    with _head() as (head, address):
        raylet = _raylet_of(head)
        raylet.suspend()
        lines = []
        with _join(address) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                lines.append(line)
                if "; trying again, " in line:
                    raylet.resume()
        output = "".join(lines)
        assert driver.returncode == 0 and lines[-1] == "joined\n", output
        assert "ray: Failed to connect to Ray cluster at " in output and "; trying again, " in output, output
        assert " of 600 seconds have passed" in output


@pytest.mark.slow
def test_a_head_that_refuses_a_token_is_told_as_such() -> None:
    with _head() as (head, address):
        _raylet_of(head)
        with _join(address, "deadlines.start_seconds=60", RAY_AUTH_TOKEN=secrets.token_hex(32)) as driver:
            output = driver.communicate(timeout=200)[0]
        assert driver.returncode == 2, output
        (sentence,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert sentence.startswith(f"error: ray: no cluster at {address}: "), sentence
        assert "InvalidAuthToken" in sentence
        assert sentence.endswith("; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as its head has them")
        assert "trying again" not in output


@pytest.mark.slow
def test_a_port_behind_which_nothing_answers_ends_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with _join(address, "deadlines.start_seconds=10") as driver:
            output = driver.communicate(timeout=200)[0]
    assert driver.returncode == 2, output
    assert f"error: ray: the head at {address} takes connections and did not answer within 20 seconds (load " in output
