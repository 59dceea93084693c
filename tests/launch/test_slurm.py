"""`rlpipe launch` on a Slurm of its own: two nodes, real jobs, real Ray nodes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from throwaway_slurm import Slurm, reason_not_possible, slurm

from rlpipe.shared.checkpoint_folder import checkpoint_path
from rlpipe.shared.project_files import ROOT as PROJECT

REASON = reason_not_possible()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
DEMO = PROJECT / "configs/demo/arithmetic.yaml"
SECONDS = 500

# In the places of Ray and rlpipe where the test is about Slurm and the job's script.
RAY = """#!/usr/bin/env bash
echo "$SLURMD_NODENAME $RAY_AUTH_TOKEN $RLPIPE_LOGS $GREETING ${{HF_TOKEN-unset}} ${{UNRELATED-unset}}" >>nodes
for word in "$@"; do case $word in --temp-dir=*) folder=${{word#*=}} ;; esac; done
mkdir -p "$folder/session_latest/logs"
echo "a log of $SLURMD_NODENAME" >"$folder/session_latest/logs/raylet.out"
trap 'sleep 1; echo "to its end" >>"$folder/session_latest/logs/raylet.out"; kill $listener' TERM
{python} -c 'import socket; s = socket.create_server(("", 6379)); [s.accept() for _ in iter(int, 1)]' &
listener=$!
wait
"""
RLPIPE = """#!/usr/bin/env bash
trap 'exit 130' TERM
echo "$RAY_AUTH_TOKEN $*" >>starts
until [ "$(wc -l <nodes)" -ge $((2 * $(wc -l <starts))) ]; do sleep 0.1; done
case "$*" in *--requeued*) exit 3 ;; esac
while [ "$SECONDS" -lt 1000 ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm(nodes=2) as made:
        yield made


def _cluster_file(folder: Path, **more: object) -> Path:
    """Two nodes with one CPU, so that a role of the demo fills a node."""
    environment = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "RLPIPE_NODE_OBJECT_STORE_BYTES": "104857600"}
    described = {
        "kind": "slurm",
        "nodes": 2,
        "node": {"cpus": 1, "memory_gigabytes": 8},
        "network": {"socket_interface": "eth0"},
        **more,
        "environment": environment | more.get("environment", {}),
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


def _launch(cluster: Slurm, folder: Path, *arguments: str, **variables: str) -> str:
    """The whole output of `rlpipe launch`, in `folder`, on the first node."""
    command = [sys.executable, "-m", "rlpipe", "launch", *arguments]
    done = cluster.run(command, cwd=folder, PYTHONPATH=str(PROJECT), **variables)
    return done.stdout + done.stderr


def _output(folder: Path, job: str) -> str:
    return "\n".join(path.read_text()[-5000:] for path in sorted(folder.glob(f"slurm*{job}*.log")))


def _rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)


def test_a_job_tells_its_nodes_everything_and_resumes_where_it_is_requeued(cluster, tmp_path):
    """Its second start fails, which is not requeued."""
    programs = tmp_path / "programs"
    _program(programs / "ray", RAY)
    _program(programs / "rlpipe", RLPIPE)
    file = _cluster_file(
        tmp_path,
        environment={"RLPIPE_PROGRAMS": str(programs), "GREETING": "hello,there"},
        slurm={"partition": "cpu", "constraint": "fast"},
    )
    _two_starts(cluster, tmp_path, file)


@pytest.mark.slow
def test_a_job_runs_in_a_container_and_is_told_to_save_there(cluster, tmp_path):
    """A stand-in for Apptainer makes the root and the mounts that it is asked for."""
    image = tmp_path / "image"
    for name in ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "tmp"):
        (image / name).mkdir(parents=True)
    programs = image / "opt" / "rlpipe" / ".venv" / "bin"
    programs.mkdir(parents=True)
    _program(programs / "ray", RAY)
    _program(programs / "rlpipe", RLPIPE)
    (tmp_path / "apptainer").symlink_to(Path(__file__).parent / "apptainer_stand_in.sh")
    mounts = [sys.prefix, f"{sys.base_prefix}:{sys.base_prefix}:ro"]
    container = {"runtime": "apptainer", "image": str(image), "mounts": mounts}
    file = _cluster_file(
        tmp_path,
        environment={"GREETING": "hello,there"},
        setup=[f"export PATH={tmp_path}:$PATH"],
        slurm={"container": container},
    )
    _two_starts(cluster, tmp_path, file)
    contained = _lines(tmp_path / "contained")
    assert all(any(command in line for line in contained) for command in ("ray_node.sh join", "exec rlpipe train"))


def _two_starts(cluster: Slurm, folder: Path, file: Path) -> None:
    run = [str(DEMO), "--cluster", str(file), "run.name=short"]
    number = _launch(cluster, folder, *run, HF_TOKEN="hf", UNRELATED="not for the job").split()[-1]
    starts, nodes = folder / "starts", folder / "nodes"
    told = lambda: f"{cluster.job(number)}\n{_output(folder, number)}"  # noqa: E731
    cluster.wait_for(lambda: _lines(starts) and len(_lines(nodes)) == 2, SECONDS, told)
    assert f"job {number}: RUNNING on node[1-2]" in _launch(cluster, folder, "status", *run)
    assert "goes back into the queue" in _launch(cluster, folder, "requeue", *run)
    cluster.wait_for(lambda: cluster.ended(number), SECONDS, told)

    job = cluster.job(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "3:0", "1"), told()
    assert cluster.run(["squeue", "--noheader"]).stdout == ""
    arguments = f"train {DEMO} run.name=short ray.address={cluster.hosts[0].address}:6379 ray.nodes=2"
    first, second = (line.split(" ", 1) for line in _lines(starts))
    assert first[1] == arguments
    assert second[1] == f"{arguments} --requeued"
    assert len(first[0]) == len(second[0]) == 64 and first[0] != second[0]
    logs = folder / "slurm-logs" / number
    expected = {f"{node} {first[0]} {logs}/start-0 hello,there hf unset" for node in ("node1", "node2")}
    assert set(_lines(nodes)[:2]) == expected
    for start in ("start-0", "start-1"):
        for node, host in enumerate(cluster.hosts, 1):
            kept = logs / start / host.address / "raylet.out"
            assert _lines(kept)[:2] == [f"a log of node{node}", "to its end"], f"{kept}\n{told()}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


SMALL = [
    "prepare.arithmetic.train_problems=64",
    "prepare.arithmetic.test_problems=16",
    "warm_start.steps=2",
    "eval.interval_iterations=0",
    "rollout.prompts_per_iteration=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=16",
    "rollout.engine.max_running_requests=16",
    "actor.threads=1",
    "checkpoint.interval_iterations=0",
    "checkpoint.save_hf=never",
    "fault.grace_seconds=120",
]


def _run_of_the_demo(folder: Path, file: Path, name: str, iterations: int) -> list[str]:
    places = ["run.directory=runs", f"model.path={folder}/policy", f"prepare.directory={folder}/task"]
    return [str(DEMO), "--cluster", str(file), f"run.name={name}", f"run.iterations={iterations}", *places, *SMALL]


def _iterations(run: Path) -> list[object]:
    return [row["iteration"] for row in _rows(run / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_trains_on_two_nodes_is_requeued_and_resumes_to_the_end(cluster, tmp_path):
    """Saved by the signal alone, since the run saves at no interval."""
    command = _run_of_the_demo(tmp_path, _cluster_file(tmp_path), "demo", iterations=80)
    number = _launch(cluster, tmp_path, *command).split()[-1]
    run = tmp_path / "runs" / "demo"
    told = lambda: f"{cluster.job(number)}\n{_output(tmp_path, number)}"  # noqa: E731
    cluster.wait_for(lambda: len(_iterations(run)) >= 2, SECONDS, told)
    # As `rlpipe launch requeue` does it, which takes longer than some iterations.
    cluster.run(["scancel", "--batch", "--signal=USR1", number])
    cluster.wait_for(lambda: cluster.job(number).get("Restarts") == "1", SECONDS, told)
    before = _iterations(run)
    assert before[-1] < 80, "requeued too late to see it resume"
    checkpoint = checkpoint_path(run / "checkpoints", before[-1])
    assert checkpoint.is_dir(), sorted(checkpoint.parent.iterdir())
    cluster.wait_for(lambda: cluster.ended(number), SECONDS, told)
    assert cluster.job(number)["JobState"] == "COMPLETED", told()
    assert _iterations(run) == list(range(81))
    assert f"job {number}: COMPLETED on node[1-2], restarted 1 times" in _launch(cluster, tmp_path, "status", *command)
    for start in ("start-0", "start-1"):
        for host in cluster.hosts:
            assert list((tmp_path / "slurm-logs" / number / start / host.address).glob("worker-*.out")), start


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_saves_before_its_time_limit_and_a_cancelled_one_before_it_ends(cluster, tmp_path):
    """Told 220 seconds before the limit, at most a minute earlier: time to start and train, and again after it."""
    file = _cluster_file(tmp_path, slurm={"time_limit": "8:00"})
    command = [*_run_of_the_demo(tmp_path, file, "limited", iterations=10_000), "fault.grace_seconds=100"]
    number = _launch(cluster, tmp_path, *command).split()[-1]
    run = tmp_path / "runs" / "limited"
    told = lambda: f"{cluster.job(number)}\n{_output(tmp_path, number)}"  # noqa: E731
    cluster.wait_for(lambda: cluster.job(number).get("Restarts") == "1", SECONDS, told)
    saved = len(_iterations(run))
    cluster.wait_for(lambda: len(_iterations(run)) >= saved + 2, SECONDS, told)
    assert "saves a checkpoint, then ends" in _launch(cluster, tmp_path, "cancel", *command)
    cluster.wait_for(lambda: cluster.ended(number), SECONDS, told)
    assert cluster.job(number)["JobState"] == "CANCELLED", told()
    assert checkpoint_path(run / "checkpoints", _iterations(run)[-1]).is_dir()
