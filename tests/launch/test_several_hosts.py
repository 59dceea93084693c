"""A run over several hosts: Ray's nodes by scripts/ray_node.sh in network namespaces, the demo across them."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from network_hosts import Host, hosts, reason_not_possible

from rlpipe.shared.project_files import ROOT as PROJECT

REASON = reason_not_possible()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
PORT = 6379  # in a namespace of its own
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
SMALL = [
    "run.name=hosts",
    "prepare.arithmetic.train_problems=64",
    "prepare.arithmetic.test_problems=16",
    "warm_start.steps=2",
    "eval.interval_iterations=0",
    "rollout.prompts_per_iteration=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=16",
    "rollout.engine.max_running_requests=16",
    "weight_sync.verify=true",
    "actor.threads=1",
]


@contextmanager
def _cluster(made: list[Host], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A Ray node on each host, with one CPU, so that a role fills a host."""
    nodes = []
    try:
        for index, host in enumerate(made):
            command = ["bash", str(PROJECT / "scripts/ray_node.sh"), "join", f"{made[0].address}:{PORT}"]
            variables = {
                "RLPIPE_NODE_ADDRESS": host.address,
                "RLPIPE_NODE_CPUS": "1",
                "RLPIPE_NODE_GPUS": "0",
                "RLPIPE_NODE_OBJECT_STORE_BYTES": str(100 * 2**20),
                "RLPIPE_LOGS": str(folder / "ray-logs"),
                "RLPIPE_SETUP": f'export PATH="{Path(sys.executable).parent}:$PATH"',
                "PYTHONPATH": str(PROJECT),
                **TOKEN,
            }
            nodes.append(host.start(command, folder / f"node-{index}.log", **variables))
        yield nodes
    finally:
        for node in nodes:
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            try:
                node.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)


@contextmanager
def _train(host: Host, folder: Path, nodes: int, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
    places = [f"run.directory={folder}", f"model.path={folder}/policy", f"prepare.directory={folder}/task"]
    joined = [f"ray.address={host.address}:{PORT}", f"ray.nodes={nodes}"]
    arguments = ["train", str(PROJECT / "configs/demo/arithmetic.yaml"), *SMALL, *places, *joined, *settings]
    # A head that has not opened its port yet is waited for by the script, as in scripts/slurm.sbatch.
    wait = f"bash {PROJECT}/scripts/ray_node.sh wait {host.address}:{PORT}"
    command = ["bash", "-c", f'{wait} && exec {sys.executable} -m rlpipe "$@"', "rlpipe", *arguments]
    driver = host.start(command, folder / "driver.log", PYTHONPATH=str(PROJECT), OMP_NUM_THREADS="1", **TOKEN)
    try:
        yield driver
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)


def test_the_demo_runs_over_two_hosts(tmp_path):
    with hosts(2) as made, _cluster(made, tmp_path) as nodes:
        with _train(made[0], tmp_path, 2, "run.iterations=2") as driver:
            assert driver.wait(600) == 0, (tmp_path / "driver.log").read_text()
        assert all(node.poll() is None for node in nodes), "the run ended a node that it had not started"
    rows = (tmp_path / "hosts" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    logs = sorted(path.name for path in (tmp_path / "ray-logs").iterdir())
    assert logs == [host.address for host in made]
    assert all(any((tmp_path / "ray-logs" / log).glob("raylet*")) for log in logs)


def test_a_host_that_does_not_come_is_named(tmp_path):
    settings = ["run.iterations=2", "deadlines.start_seconds=40"]  # twice as long a busy head may take to answer
    with hosts(1) as made, _cluster(made, tmp_path), _train(made[0], tmp_path, 2, *settings) as driver:
        assert driver.wait(300) == 2
    output = (tmp_path / "driver.log").read_text()
    assert f"1 of 2 nodes joined within 40 seconds ({made[0].address})" in output


def test_a_host_that_is_cut_off_ends_the_run_with_one_sentence(tmp_path):
    with hosts(2) as made, _cluster(made, tmp_path):
        limits = ["rollout", "train", "weight_sync"]
        deadlines = [f"deadlines.{name}_seconds=60" for name in limits]
        with _train(made[0], tmp_path, 2, "run.iterations=1000", *deadlines) as driver:
            metrics = tmp_path / "hosts" / "metrics.jsonl"
            end = time.monotonic() + 500
            while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
                assert driver.poll() is None and time.monotonic() < end, (tmp_path / "driver.log").read_text()
                time.sleep(1)
            made[1].cut_off()
            assert driver.wait(300) == 2, (tmp_path / "driver.log").read_text()
    output = (tmp_path / "driver.log").read_text()
    assert "error: " in output
    assert "Traceback" not in output
