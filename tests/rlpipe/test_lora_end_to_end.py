"""Adapters through whole runs: from examples to GRPO, to engines that keep them beside the model, out to files."""

import shutil
from pathlib import Path

import pytest
import torch
from run_support import PROJECT, UNTRACKED, metric_rows, run_arguments, run_command
from test_train_end_to_end import assert_same_run

from tests.chaos.chaos_schedule import Strike
from tests.chaos.chaos_support import assert_healed, disturbed_run

LORA = "actor.lora={rank: 4, alpha: 8}"
ALONE = [LORA, "weight_sync.adapters=alone", "warm_start=null", "actor.optimizer.learning_rate=0.01", *UNTRACKED]
FORMATS = ("same", "float8")


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    """A supervised run of adapters; the model and the task of all tests lie beside it."""
    folder = tmp_path_factory.mktemp("lora") / "examples"
    settings = ["run.iterations=6", "sft.sequences_per_step=32", "sft.response_template='{solution}'"]
    run_command("sft", *run_arguments(folder, *ALONE, *settings, "algorithm.kl.coefficient=0", "reward.name=math"))
    losses = [row["train/loss"] for row in metric_rows(folder / "small") if row["iteration"]]
    assert losses[-1] < losses[0]
    return folder / "small/policy/adapter"


@pytest.fixture(scope="module")
def run(examples) -> Path:
    """GRPO that goes on with these adapters."""
    folder = examples.parents[3] / "run"
    run_command("train", *run_arguments(folder, *_goes_on(examples)))
    return folder / "small"


def _goes_on(examples: Path, base: str = "same") -> list[str]:
    return [*ALONE, f"actor.lora.start_path={examples}", f"actor.lora.base={base}"]


def _agrees_with_the_engine(folder: Path) -> None:
    model_bytes = (folder / "policy/model.safetensors").stat().st_size
    for row in metric_rows(folder)[1:]:
        assert row["mismatch/logprob_abs_max"] < 1e-4
        assert row["weight_sync/version"] == row["iteration"]
        assert row["weight_sync/bytes"] < model_bytes / 5
    assert metric_rows(folder)[-1]["train/kl_loss"] > 1e-4  # what an engine without adapters would be off by


@pytest.mark.slow
def test_engines_sample_with_adapters_that_come_alone(run):
    _agrees_with_the_engine(run)


@pytest.mark.slow
def test_a_run_cut_off_after_two_iterations_ends_in_the_same_bits(run, examples, tmp_path):
    resumed = tmp_path / "small"
    shutil.copytree(run, resumed)
    shutil.rmtree(max((resumed / "checkpoints").iterdir()))
    shutil.rmtree(resumed / "policy")
    arguments = run_arguments(run.parent, *_goes_on(examples), f"run.directory={tmp_path}")
    run_command("train", *arguments, "--resume")
    assert_same_run(run, resumed)


@pytest.mark.slow
def test_engines_in_the_places_of_lost_ones_get_the_model_and_the_adapters(run, examples):
    strikes = [Strike("scheduler", "kill", "rollout", 2, 0.04), Strike("engine", "stop", "weight_sync", 3)]
    disturbed = disturbed_run(examples.parents[3] / "disturbed", strikes, *_goes_on(examples))
    assert_healed(disturbed, None, iterations=4)
    assert [row["strike"] for row in disturbed.strikes] == [strike.name for strike in strikes]
    assert_same_run(run, disturbed.folder)


@pytest.mark.slow
@pytest.mark.parametrize("base", FORMATS)
def test_exports_load_elsewhere_and_are_one_policy(run, examples, tmp_path, base):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = run
    if base == "float8":
        folder = tmp_path / "small"
        arguments = run_arguments(run.parent, *_goes_on(examples, base), f"run.directory={tmp_path}")
        run_command("train", *arguments, "run.iterations=2")
        _agrees_with_the_engine(folder)
    run_command("export", str(folder), str(tmp_path / "merged"), "--merge")
    run_command("export", str(folder), str(tmp_path / "adapter"))
    names = "model.safetensors"
    assert (tmp_path / "merged" / names).read_bytes() == (folder / "policy" / names).read_bytes()
    tokens = torch.arange(40, 72)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(run.parents[1] / "small-policy", dtype=torch.float32)
    with torch.no_grad():
        before = plain(tokens).logits
        adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")(tokens).logits
        found = merged(tokens).logits
    assert (adapted - before).abs().max() > 0.01
    assert (adapted - found).abs().max() < (1e-4 if base == "same" else 0.3)


@pytest.mark.slow
def test_the_faster_way_is_tried_at_the_start_and_kept(examples, tmp_path):
    settings = [*_goes_on(examples), "weight_sync.adapters=auto", "run.iterations=2", f"run.directory={tmp_path}"]
    arguments = run_arguments(examples.parents[3] / "auto", *settings)
    output = run_command("train", *arguments)
    assert "adapters go to the engines" in output
    chosen = (tmp_path / "small/config.yaml").read_text()
    assert "adapters: alone" in chosen or "adapters: merged" in chosen
    again = run_command("train", *arguments, "run.iterations=3", "--resume")
    assert "adapters go to the engines" not in again
    assert (tmp_path / "small/config.yaml").read_text().count("adapters: auto") == 0


@pytest.mark.slow
def test_what_engines_cannot_serve_is_refused_before_anything_starts(tmp_path):
    from run_support import start_command

    hybrid = str(PROJECT / "configs/demo/hybrid.yaml")
    arguments = run_arguments(tmp_path, *ALONE, f"model.path={tmp_path}/hybrid", config=hybrid)
    process = start_command("train", *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "weight_sync.adapters is 'alone', but engines do not serve adapters of Qwen3_5Moe" in output
