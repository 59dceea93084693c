"""`rlpipe launch`: golden texts for each kind of cluster, cluster files, what is refused."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.commands.clusters import cluster_names, load_cluster
from rlpipe.commands.launch import launch
from rlpipe.config.cluster import SlurmConfig
from rlpipe.shared.errors import ConfigError, ResourceError
from rlpipe.shared.project_files import CLUSTERS
from rlpipe.shared.project_files import ROOT as PROJECT

GOLDEN = Path(__file__).parent / "golden"
DEMO = PROJECT / "configs/demo/arithmetic.yaml"
SHARED = ["prepare.directory=/shared/task", "model.path=/shared/policy"]


def _script(name: str) -> str:
    cluster = load_cluster(name)
    settings = ["seed=1", *(SHARED if cluster.kind == "kubernetes" else [])]
    settings += ["ray.colocate=true"] if cluster.gpus == 1 else []
    # The whole configuration would change with every default.
    script = re.sub(r"(config.yaml: \|\n)(    .*\n)+", r"\1    ...\n", launch(DEMO, settings, name).script())
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


def test_a_run_that_does_not_fit_by_its_plan_is_refused():
    recipe = PROJECT / "configs/recipes/qwen3_5_35b_a3b_dapo.yaml"
    narrow = ["rollout.engines=8", "rollout.engine.tensor_parallel=1"]
    with pytest.raises(ResourceError, match=r"GPU while weights pass: .* set rollout.engines=4 .* or add --force"):
        launch(recipe, narrow, "local_8x80gb")
    assert "launched with --force" in launch(recipe, narrow, "local_8x80gb", force=True).script()
    assert "By rlpipe plan it fits, at " in launch(recipe, [], "local_8x141gb").script()
    elsewhere = launch(recipe, ["model.path=/on/the/cluster"], "local_8x80gb").script()
    assert "Not planned, its model cannot be read here: no model config at '/on/the/cluster'" in elsewhere


def test_every_cluster_file_says_what_it_is():
    for path in CLUSTERS.glob("*.yaml"):
        assert path.read_text().startswith("---\n# "), path


def test_no_script_ends_what_it_did_not_start():
    scripts = [*PROJECT.glob("scripts/*.sh"), PROJECT / "scripts/slurm.sbatch"]
    for path in scripts:
        for forbidden in ("pkill", "killall", "ray stop"):
            assert forbidden not in path.read_text(), f"{path}: {forbidden}"


CONTAINER = """
kind: slurm
node: {{memory_gigabytes: 100, cpus: 4, gpus: 2, gpu_memory_gigabytes: 80}}
slurm:
  account: research
  qos: high
  constraint: h100&ib
  reservation: course
  container:
    runtime: {runtime}
    image: /images/rlpipe.sqsh
    mounts: ["/data:/data:ro", /scratch]
    options: [{option}]
"""


@pytest.mark.parametrize(
    ("runtime", "option", "variable", "expected"),
    [
        (
            "pyxis",
            "--no-container-mount-home",
            "RLPIPE_STEP_OPTIONS",
            "--container-image=/images/rlpipe.sqsh --container-mounts={cwd}:{cwd},{project}:{project},/data:/data:ro,"
            "/scratch:/scratch --container-workdir={cwd} --no-container-mount-home",
        ),
        (
            "apptainer",
            "--cleanenv",
            "RLPIPE_STEP_PREFIX",
            "apptainer exec --nv --pwd={cwd} --bind={cwd} --bind={project} --bind=/data:/data:ro --bind=/scratch "
            "--cleanenv /images/rlpipe.sqsh",
        ),
    ],
)
def test_a_container_sees_the_working_folder_and_its_mounts(tmp_path, monkeypatch, runtime, option, variable, expected):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.yaml"
    file.write_text(CONTAINER.format(runtime=runtime, option=option))
    prepared = launch(DEMO, [], str(file))
    assert prepared.environment[variable] == expected.format(cwd=tmp_path, project=PROJECT)
    assert prepared.environment["RLPIPE_PROGRAMS"] == "/opt/rlpipe/.venv/bin"
    asked = {"--account=research", "--qos=high", "--constraint=h100&ib", "--reservation=course"}
    assert asked <= set(prepared.command)
    elsewhere = tmp_path.parent / "elsewhere.yaml"
    elsewhere.write_text(f"base: {DEMO}\n")
    with pytest.raises(ConfigError, match="is not in the job's container, .* slurm.container.mounts"):
        launch(elsewhere, [], str(file))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("02:00:00", 7200),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:05", 172805),
        ("UNLIMITED", float("inf")),
    ],
)
def test_a_time_limit_reads_as_slurm_reads_it(limit, seconds):
    assert SlurmConfig(time_limit=limit).time_limit_seconds == seconds


def test_the_signal_comes_early_enough_to_save(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text('kind: slurm\nnode: {memory_gigabytes: 8}\nslurm: {time_limit: "5:00"}\n')
    assert "--signal=B:USR1@150" in launch(DEMO, ["fault.grace_seconds=29.5"], str(file)).command
    with pytest.raises(ConfigError, match="slurm.time_limit is 5:00, but the job is told to save 320 seconds before"):
        launch(DEMO, ["fault.grace_seconds=200"], str(file))


def test_a_time_limit_that_slurm_cannot_read_is_one_sentence(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text('kind: slurm\nnode: {memory_gigabytes: 8}\nslurm: {time_limit: "a day"}\n')
    with pytest.raises(ConfigError, match="time_limit is 'a day': write minutes"):
        launch(DEMO, [], str(file))


def test_a_configuration_in_a_mount_is_named_as_the_container_sees_it(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    own, file = tmp_path / "mine" / "own.yaml", tmp_path / "cluster.yaml"
    own.write_text(f"base: {DEMO}\n")
    text = CONTAINER.format(runtime="pyxis", option="--no-container-mount-home")
    for mount, seen in ((f"{tmp_path}/mine:/there:ro", "/there/own.yaml"), (f"{tmp_path}/mine", str(own))):
        file.write_text(text.replace("/data:/data:ro", mount))
        assert seen in launch(own, [], str(file)).command


def test_a_script_names_folders_and_values_whatever_characters_they_hold(tmp_path, monkeypatch):
    folder = tmp_path / "my $runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "cluster.yaml").write_text(
        "kind: local\nnode: {memory_gigabytes: 8}\nnetwork: {socket_interface: eth0}\n"
        'environment: {NOTE: "it\'s a $HOME", NCCL_SOCKET_IFNAME: ib0}\n'
    )
    script = launch(DEMO, [], "cluster.yaml").script()
    *prepared, _ = script.splitlines()
    printed = 'printf "%s\\n" "$PWD" "$NOTE" "$NCCL_SOCKET_IFNAME" "$GLOO_SOCKET_IFNAME"'
    done = subprocess.run(["bash", "-c", "\n".join([*prepared, printed])], capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines() == [str(folder), "it's a $HOME", "ib0", "eth0"]
