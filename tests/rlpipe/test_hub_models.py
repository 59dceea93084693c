"""Models by their name on the hub, from a cache alone: no network is there."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hub_cache import add_to_hub_cache
from run_support import PROJECT, run_arguments, run_command, start_command

from rlpipe.config.load import load_config
from rlpipe.config.model import TinyPolicyConfig
from rlpipe.model.hub import HubName
from rlpipe.prepare.tiny_policy import make_tiny_policy
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rollout.pool import RolloutPool
from rollout.requests import GenerateRequest, Generation, SamplingParameters, sample_seed
from tests.search_path import search_path

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


@pytest.fixture(scope="module")
def run(home, tmp_path_factory):
    """A run whose policy and reference have names on the hub, and what `rlpipe export` made of its checkpoint."""
    folder = tmp_path_factory.mktemp("named")
    rows = [{"messages": [{"role": "user", "content": f"{n} + 1 ="}], "answer": str(n + 1)} for n in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data.train=[{{name: rows, path: {folder}/rows.jsonl, prompt_column: messages, label_column: answer}}]"
    arguments = run_arguments(folder, data, "run.iterations=1", "warm_start=null", "eval.datasets=[]")
    arguments += [
        "prepare.policy=null",
        "prepare.arithmetic=null",
        f"model.path={_MODEL}",
        f"model.reference_path={_REFERENCE}@step-100",
    ]
    arguments += ["actor.optimizer.learning_rate=0.05", "actor.optimizer.warmup_steps=0"]
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    run_command("train", *arguments, "checkpoint.interval_iterations=1", **environment)
    run_command("export", f"{folder}/small@1", f"{folder}/out", **environment)
    return folder


@pytest.mark.slow
def test_a_run_keeps_the_commits_of_the_models_it_took_by_name(run, home):
    saved = yaml.safe_load((run / "small/config.yaml").read_text())["model"]
    for key, name in (("path", _MODEL), ("reference_path", _REFERENCE)):
        repository, commit = saved[key].split("@")
        assert repository == name
        assert (home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / commit).is_dir()


@pytest.mark.slow
def test_an_export_is_the_policy_that_the_run_wrote(run):
    exported, written = run / "out", run / "small/policy"
    assert sorted(path.name for path in exported.iterdir()) == sorted(path.name for path in written.iterdir())
    for path in exported.iterdir():
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name
    card = (exported / "README.md").read_text()
    assert f"base_model: {_MODEL}\n" in card and "after 1 of 1 iterations of GRPO" in card


@pytest.mark.slow
def test_an_engine_serves_an_export_with_the_actors_log_probabilities(run, home, environment, ray_session):
    config = load_config(run / "small/config.yaml")
    sampling = SamplingParameters(24, ignore_eos=True)
    requests = [
        GenerateRequest(f"r{n}", tuple(range(n, 9 * n + 8)), sampling, sample_seed(1, f"r{n}")) for n in range(4)
    ]
    with RolloutPool.start(config, str(run / "out"), log_directory=str(run)) as pool:
        pool.wait_until_ready()
        generations = asyncio.run(_answers(pool, requests))
    sequences = [(one.prompt_ids, tuple(answer.token_ids)) for one, answer in zip(requests, generations, strict=True)]
    of_engine = np.concatenate([one.logprobs for one in generations])
    assert np.abs(_of_actor(run, environment, sequences) - of_engine).max() < 1e-4
    initial = np.concatenate([_of_transformers(home / "../policy", *one) for one in sequences])
    assert np.abs(initial - of_engine).max() > 1e-2  # the policy did move


async def _answers(pool: RolloutPool, requests: list[GenerateRequest]) -> list[Generation]:
    client = pool.client()
    return await asyncio.gather(*map(client.generate, requests))


def _of_actor(run: Path, environment: dict[str, str], sequences: list[Any]) -> np.ndarray:
    checkpoint = latest_checkpoint(run / "small/checkpoints")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("actor_logprobs.py")), str(run / "small"), str(checkpoint)],
        env={**os.environ, **environment, "PYTHONPATH": search_path(), "CUDA_VISIBLE_DEVICES": ""},
        input=json.dumps(sequences),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return np.concatenate(json.loads(done.stdout))


def _of_transformers(folder: Path, prompt: tuple[int, ...], response: tuple[int, ...]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()


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
