"""`rlpipe launch`: golden texts for each kind of cluster, the scripts' own behaviour with stand-in schedulers."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.commands.launch import launch
from rlpipe.commands.launch.clusters import cluster_names, load_cluster
from rlpipe.shared.errors import ConfigError, ResourceError
from rlpipe.shared.project_files import CLUSTERS
from rlpipe.shared.project_files import ROOT as PROJECT

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = json.loads((PROJECT / "scripts/kubernetes/rayjob.schema.json").read_text())
DEMO = PROJECT / "configs/demo/arithmetic.yaml"


def _script(name: str) -> str:
    script = launch(DEMO, ["seed=1"], name).script()
    return script.replace(str(Path(sys.executable).parent), "/programs").replace(str(PROJECT), "/project")


@pytest.mark.parametrize("name", cluster_names())
def test_what_would_run_is_as_recorded(name):
    recorded = GOLDEN / f"{name}.sh"
    if os.environ.get("RLPIPE_UPDATE_GOLDEN"):
        recorded.parent.mkdir(exist_ok=True)
        recorded.write_text(_script(name))
    assert _script(name) == recorded.read_text()


def test_every_recorded_text_belongs_to_a_cluster():
    assert sorted(path.stem for path in GOLDEN.glob("*.sh")) == cluster_names()


@pytest.mark.parametrize("name", [name for name in cluster_names() if load_cluster(name).kind == "kubernetes"])
def test_the_manifest_fits_the_schema(name):
    text = launch(DEMO, [], name).text
    jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_the_schema_refuses_a_field_that_does_not_exist():
    job = yaml.safe_load((PROJECT / "scripts/kubernetes/rayjob.yaml").read_text())
    jsonschema.validate(job, SCHEMA)
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError, match="volumeMount"):
        jsonschema.validate(job, SCHEMA)


def test_secrets_go_by_name_only(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "the-value")
    for name in cluster_names():
        assert "the-value" not in _script(name)
    assert "WANDB_API_KEY" in _script("slurm_2x8x141gb")


def test_settings_of_the_cluster_lie_under_those_of_the_command_line(tmp_path):
    cluster = tmp_path / "mine.yaml"
    cluster.write_text(
        "kind: local\nnode: {memory_gigabytes: 8}\nsettings: {rollout: {engines: 2}, run: {name: here}}\n"
    )
    prepared = launch(DEMO, ["run.name=there"], str(cluster))
    assert prepared.command[-3:] == ("rollout.engines=2", 'run.name="here"', "run.name=there")
    assert "run there on" in prepared.title


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: slurm\nnode: {memory_gigabytes: 8}\nslurm: {partiton: gpu}\n", "did you mean 'slurm.partition'"),
        ("kind: kubernetes\nnode: {memory_gigabytes: 8}\n", "no section kubernetes"),
        ("kind: local\nnodes: 2\nnode: {memory_gigabytes: 8}\n", "nodes is 2"),
    ],
)
def test_a_wrong_cluster_file_is_one_sentence(tmp_path, text, message):
    cluster = tmp_path / "wrong.yaml"
    cluster.write_text(text)
    with pytest.raises(ConfigError, match=message):
        launch(DEMO, [], str(cluster))


def test_an_unknown_cluster_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'local_cpu'"):
        launch(DEMO, [], "local_cup")


def test_a_run_with_too_many_gpus_is_refused():
    with pytest.raises(ResourceError, match="needs 20 GPUs .* has 16: set nodes in its file to 3"):
        launch(DEMO, ["actor.processes=16", "rollout.engines=4"], "slurm_2x8x141gb")


def test_every_cluster_file_says_what_it_is():
    for path in CLUSTERS.glob("*.yaml"):
        assert path.read_text().startswith("---\n# "), path


def test_the_command_runs_what_it_prints(tmp_path, monkeypatch):
    """With a stand-in sbatch that writes down its arguments and the variables it was given."""
    _program(tmp_path / "sbatch", 'printf "%s\\n" "$@" >"$RECORD/arguments"; env >"$RECORD/environment"; exit 7')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path))
    result = CliRunner().invoke(app, ["launch", str(DEMO), "--cluster", "slurm_2x8x141gb", "seed=1"])
    assert result.exit_code == 7
    prepared = launch(DEMO, ["seed=1"], "slurm_2x8x141gb")
    assert (tmp_path / "arguments").read_text().splitlines() == list(prepared.command[1:])
    variables = (tmp_path / "environment").read_text().splitlines()
    assert {f"{name}={value}" for name, value in prepared.environment.items()} <= set(variables)


def test_no_script_ends_what_it_did_not_start():
    scripts = [*PROJECT.glob("scripts/*.sh"), PROJECT / "scripts/slurm.sbatch"]
    for path in scripts:
        for forbidden in ("pkill", "killall", "ray stop"):
            assert forbidden not in path.read_text(), f"{path}: {forbidden}"


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@contextmanager
def _slurm(folder: Path, train: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """scripts/slurm.sbatch in a copy of the project's scripts, with stand-ins for Slurm, Ray and rlpipe."""
    programs, scripts = folder / "bin", folder / "scripts"
    programs.mkdir()
    scripts.mkdir()
    for name in ("slurm.sbatch", "ray_node.sh"):
        (scripts / name).write_text((PROJECT / "scripts" / name).read_text())
    _program(
        programs / "scontrol", 'if [ "$1" = requeue ]; then echo "requeue $2" >>calls; else echo one; echo two; fi'
    )
    _program(programs / "srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
    _program(
        programs / "ray",
        'echo "ray $*" >>calls; trap "echo ray ended >>calls; exit" TERM; '
        f"exec {sys.executable} -m http.server {variables['RLPIPE_RAY_PORT']} --bind 127.0.0.1 2>/dev/null",
    )
    _program(programs / "rlpipe", train)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "RLPIPE_SCRIPTS": str(scripts),
        "RLPIPE_NODE_ADDRESS": "127.0.0.1",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "one,two",
        **variables,
    }
    job = subprocess.Popen(
        ["bash", str(scripts / "slurm.sbatch"), "config.yaml", "seed=1"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def _calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def _wait_for(folder: Path, text: str) -> None:
    end = time.monotonic() + 60
    while not ((folder / "calls").exists() and any(text in call for call in _calls(folder))):
        assert time.monotonic() < end, f"no call of {text}"
        time.sleep(0.05)


def test_a_slurm_job_trains_once_and_hands_on_the_exit_code(tmp_path, free_port):
    with _slurm(tmp_path, 'echo "rlpipe $*" >>calls; exit 5', RLPIPE_RAY_PORT=str(free_port)) as job:
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 5, output
    train = [call for call in _calls(tmp_path) if call.startswith("rlpipe")]
    assert train == [f"rlpipe train config.yaml seed=1 ray.address=127.0.0.1:{free_port} ray.nodes=2"]
    assert any(f"--head --port={free_port}" in call for call in _calls(tmp_path))


def test_a_requeued_slurm_job_resumes(tmp_path, free_port):
    variables = {"RLPIPE_RAY_PORT": str(free_port), "SLURM_RESTART_COUNT": "1"}
    with _slurm(tmp_path, 'echo "rlpipe $*" >>calls', **variables) as job:
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    assert [call for call in _calls(tmp_path) if call.startswith("rlpipe")][0].endswith("ray.nodes=2 --requeued")


def test_a_slurm_job_requeues_itself_before_its_time_is_over(tmp_path, free_port):
    train = 'trap "echo interrupted >>calls; exit 130" TERM; echo "rlpipe $*" >>calls; while :; do sleep 0.1; done'
    with _slurm(tmp_path, train, RLPIPE_RAY_PORT=str(free_port)) as job:
        _wait_for(tmp_path, "rlpipe train")
        os.kill(job.pid, signal.SIGUSR1)
        job.communicate(timeout=60)
    calls = _calls(tmp_path)
    assert calls[-2:] == ["interrupted", "requeue 42"]
