"""Models by their name on the hub, from a cache alone: no network is there."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_cache import add_to_hub_cache
from run_support import PROJECT, run_arguments, run_command, start_command

from rlpipe.config.model import TinyPolicyConfig
from rlpipe.model.hub import HubName
from rlpipe.prepare.tiny_policy import make_tiny_policy

_MODEL, _REFERENCE = "some-one/Tiny-0.1B", "some-one/Tiny.reference"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME with a model, one under a branch of its own, and one of which only the configuration was downloaded."""
    folder = tmp_path_factory.mktemp("hub")
    for seed, name in enumerate(("policy", "reference")):
        make_tiny_policy(TinyPolicyConfig(layers=2, hidden_size=64), folder / name, seed)
    add_to_hub_cache(folder / "home", _MODEL, folder / "policy")
    add_to_hub_cache(folder / "home", _REFERENCE, folder / "reference", branch="step-100")
    add_to_hub_cache(folder / "home", "some-one/partial", folder / "policy", keep="config.json")
    return folder / "home"


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def test_a_name_is_owner_and_model_with_a_revision():
    assert HubName.parse("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B", None)
    assert HubName.parse("Qwen/Qwen3-0.6B@refs/pr/3") == HubName("Qwen/Qwen3-0.6B", "refs/pr/3")
    for path in ("policy", "/models/policy", "./models/policy", "../policy", "runs/a/policy", "~/policy", "a/b@"):
        assert HubName.parse(path) is None


def test_a_run_takes_policy_and_reference_by_name(tmp_path, environment):
    arguments = run_arguments(tmp_path, "run.iterations=1", "warm_start=null", "eval.datasets=[]")
    arguments += ["prepare.policy=null", f"model.path={_MODEL}", f"model.reference_path={_REFERENCE}@step-100"]
    run_command("train", *arguments, "checkpoint.interval_iterations=0", **environment)
    saved = yaml.safe_load((tmp_path / "small/config.yaml").read_text())["model"]
    cache = Path(environment["HF_HOME"]) / "hub"
    for key, name in (("path", _MODEL), ("reference_path", _REFERENCE)):
        repository, commit = saved[key].split("@")
        assert repository == name
        assert (cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit).is_dir()
    assert (tmp_path / "small/policy/tokenizer.json").is_file()


def test_commands_that_look_at_a_model_take_its_name(environment):
    assert "FLOPs of 64 tokens" in run_command("flops", _MODEL, "--seqlens", "64", **environment)
    run = ("configs/demo/arithmetic.yaml", f"model.path={_MODEL}")
    assert "parameters" in run_command("plan", *run, "--cluster", "local_cpu", **environment)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("some-one/unknown", "hf download some-one/unknown"),
        (f"{_MODEL}@v2", f"hf download {_MODEL} --revision v2"),
        ("some-one/partial", "hf download some-one/partial"),
    ],
)
def test_a_model_that_is_not_in_the_cache_is_one_sentence_with_the_command(environment, name, command):
    arguments = ("configs/demo/arithmetic.yaml", "prepare.policy=null", f"model.path={name}", "--dry-run")
    process = start_command("train", *arguments, **environment)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    (sentence,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert f"run `{command}` where there is network" in sentence
    assert environment["HF_HOME"] in sentence


def test_every_process_finds_the_same_folder(environment):
    code = (
        "from rlpipe.model.hub import model_folder, pinned\n"
        f"name = pinned({_MODEL!r})\nassert pinned(name) == name\n"
        f"assert model_folder(name) == model_folder({_MODEL!r})\nprint(model_folder(name))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert (Path(found.stdout.strip()) / "config.json").is_symlink()
