"""`rlpipe doctor --cluster`: real nodes of a Ray cluster, and what is said of nodes that differ."""

import os
import re
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.commands.doctor.check import Status
from rlpipe.commands.doctor.node_facts import Gpu, NodeFacts
from rlpipe.commands.doctor.nodes import judge_node, judge_together
from rlpipe.config.cluster import NodeConfig
from rlpipe.shared.project_files import ROOT as PROJECT
from tests.search_path import search_path

TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
H100 = Gpu("580.65", "NVIDIA H100 80GB HBM3", "9.0", 5 * 2**20)
NODE = NodeFacts(
    address="10.0.0.1",
    versions={"python": "3.12.3", "torch": "2.11.0", "ray": "2.56.1"},
    gpus=(H100,) * 8,
    cores=96,
    load=1.0,
    free_bytes=1900 * 10**9,
    memory_bytes=2000 * 10**9,
    hub="",
    reported_gpus=8.0,
)
OTHER = replace(NODE, address="10.0.0.2")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_nodes_of_a_real_cluster_are_asked(tmp_path):
    environment = {**os.environ, **TOKEN, "PYTHONPATH": search_path(), "HF_HUB_OFFLINE": "1"}
    script = str(Path(__file__).with_name("two_ray_nodes.py"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, script], env=environment, **pipes) as nodes:
        address = nodes.stdout.readline().strip()
        cluster = tmp_path / "mine.yaml"
        cluster.write_text(f"kind: ray\nnodes: 2\nray_address: {address}\nnode: {{memory_gigabytes: 0.1, gpus: 0}}\n")
        command = [sys.executable, "-m", "rlpipe", "doctor", "--cluster", str(cluster)]
        done = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=300)
        assert nodes.poll() is None  # the cluster is left as it was
        nodes.stdin.close()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines()]
    asked = [line for _, line in lines if line.startswith("node ")]
    assert len(asked) == 2 and all("clock differs by" in line and "0 GPUs" in line for line in asked), done.stdout
    assert "2 nodes with the same Python and packages" in done.stdout
    assert "not asked, HF_HUB_OFFLINE is set on 2 nodes" in done.stdout


def test_a_cluster_that_does_not_run_cannot_be_asked():
    refused = CliRunner().invoke(app, ["doctor", "--cluster", "slurm_2x8x141gb"])
    assert refused.exit_code == 2 and "give the host:port of its Ray head" in refused.output


def test_like_nodes_are_fine():
    checks = [*map(judge_node, (NODE, OTHER)), *judge_together([NODE, OTHER])]
    assert {check.status for check in checks} == {Status.OK}
    assert [check.name for check in checks] == ["node", "node", "versions of nodes", "driver", "GPUs of nodes", "hub"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"skew_seconds": 2.5}, "start chrony or ntpd"),
        ({"load": 60.0}, "something else runs there"),
        ({"free_bytes": 10**9}, "something else has its memory"),
        ({"gpus": (replace(H100, used_bytes=30 * 2**30), *NODE.gpus[1:])}, "1 of its GPUs hold more than 1 GiB"),
    ],
)
def test_what_is_wrong_with_a_node_is_told(change, words):
    check = judge_node(replace(NODE, **change))
    assert check.status is Status.WARN and words in check.fix


def test_a_node_with_less_than_the_cluster_s_file_says_fails():
    described = NodeConfig(gpus=8, gpu="NVIDIA H200", gpu_memory_gigabytes=150, cpus=128, memory_gigabytes=1900)
    check = judge_node(NODE, described=described)
    assert check.status is Status.FAIL and "says 128 cores, NVIDIA H200: correct it" in check.fix
    assert judge_node(NODE, described=described.model_copy(update={"cpus": 96, "gpu": H100.name})).status is Status.OK


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (
            {"versions": NODE.versions | {"torch": "2.13.0"}},
            Status.FAIL,
            "torch: 2.11.0 on 10.0.0.1; 2.13.0 on 10.0.0.2",
        ),
        ({"gpus": (replace(H100, driver="570.1"),) * 8}, Status.WARN, "580.65 on 10.0.0.1; 570.1 on 10.0.0.2"),
        ({"gpus": ()}, Status.WARN, "none on 10.0.0.2"),
        ({"hub": "no route"}, Status.WARN, "10.0.0.2: no route"),
    ],
)
def test_nodes_that_differ_are_named(change, status, words):
    worst = [check for check in judge_together([NODE, replace(OTHER, **change)]) if check.status is not Status.OK]
    assert any(check.status is status and words in check.found and check.fix for check in worst), worst
