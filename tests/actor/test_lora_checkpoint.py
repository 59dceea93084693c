"""Adapters in checkpoints, as the reference's absence, and merged for engines: the bits that they must have."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from model_support import DENSE, GDN_MOE, MOE, TinyModel, in_worker, read_tensors, write_checkpoint
from train_support import run_processes

from actor.hf.adapter_table import adapter_table
from actor.hf.engine_adapters import engine_refusal
from rlpipe.config.lora import LoraConfig
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.checkpoint_folder import checkpoint_path

SMALL = TinyModel("small", "qwen3", {"num_hidden_layers": 1, "vocab_size": 96})


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    found = {model.name: write_checkpoint(model, folder) for model in (DENSE, MOE, GDN_MOE, SMALL)}
    return found | {"other": write_checkpoint(replace(GDN_MOE, name="other"), folder)}


def _run(count, name, *arguments):
    answers = run_processes(count, in_worker, (f"lora_checkpoint_workers.{name}", *arguments))
    return [answer for (answer,) in answers]


@pytest.fixture(scope="module")
def single(paths, tmp_path_factory):
    return _run(1, "single_process_cases", paths, tmp_path_factory.mktemp("single"))[0]


@pytest.fixture(scope="module")
def double(paths, tmp_path_factory):
    return _run(2, "two_process_cases", paths, tmp_path_factory.mktemp("double"))


def _assert_exact(found):
    for what in ("metrics", "weights", "reference"):
        resumed, unbroken = found[what]
        assert resumed == unbroken, what


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "bfloat16", "dropout"])
def test_continuing_from_a_checkpoint_gives_the_same_bits(single, case):
    _assert_exact(single[case])


@pytest.mark.slow
def test_a_checkpoint_holds_adapters_alone(single):
    names = [name for name in single["names"] if "." in name]
    assert any(name.startswith("optimizer.") for name in names) and any(".experts.lora2.b" in name for name in names)
    assert [name for name in names if ".lora" not in name] == []


@pytest.mark.slow
def test_adapters_of_other_settings_and_other_models_are_refused(single):
    rank, full, other = single["refused"]
    assert "saved with lora = " in rank and "leave actor.lora as in the run" in rank
    assert "saved with lora = " in full
    assert "saved with base = " in other and "leave the weights in model.path as in the run" in other


@pytest.mark.slow
def test_a_thousand_updates_leave_no_trace(single):
    assert single["updates"] == {"moved": 1000, "same": True, "same_base": True}


@pytest.mark.slow
def test_the_reference_is_the_model_without_adapters(single):
    found = single["reference"]
    assert found["moved"] and found["is_base"] and found["unharmed"] and found["follows"]
    assert found["copied_bytes"] < found["model_bytes"] / 3


@pytest.mark.slow
def test_dropout_leaves_a_factor_that_all_have_the_same_everywhere(double):
    one, other = (process["dropout_tp2"] for process in double)
    assert len(one) == 6
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _assert_sent(found):
    assert found == {
        "planned": True,
        "same": True,
        "moved": True,
        "others": ["gate_proj", "k_proj", "v_proj"],
        "zero": True,
        "contents": ["merged", "model_and_adapters", "adapters"],
    }


@pytest.mark.slow
def test_engines_get_the_factors_of_the_file_and_zeros_beside_them(single):
    _assert_sent(single["sent"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["merged_ep2", "merged_tp2"])
def test_adapters_are_merged_where_the_weights_are(double, case):
    assert all(process[case] for process in double)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sent_tp2", "sent_pp2"])
def test_engines_get_the_same_factors_from_two_processes(double, case):
    _assert_sent(double[0][case])


@pytest.mark.parametrize(
    ("model", "lora", "reason"),
    [
        (DENSE, {}, ""),
        (MOE, {"targets": ["q_proj", "o_proj"]}, ""),
        (MOE, {"experts": "each"}, "engines serve no adapters of down_proj, gate_up_proj of Qwen3MoeForCausalLM"),
        (DENSE, {"targets": ["v_proj", "lm_head"]}, "engines serve no adapters of lm_head of Qwen3ForCausalLM"),
        (GDN_MOE, {}, "engines do not serve adapters of Qwen3_5MoeForCausalLM exactly"),
    ],
)
def test_what_engines_can_keep_apart(paths, model, lora, reason):
    description = trainable_model(paths[model.name])
    config = LoraConfig.model_validate({"rank": 2} | lora)
    table = adapter_table(description, config, padded_vocab_size=description.vocab_size)
    assert engine_refusal(description, table) == reason


@pytest.mark.slow
def test_two_processes_continue_and_refer_alike(double):
    for rank in double:
        _assert_exact(rank["pp2"])
        found = rank["reference_pp2"]
        assert found["moved"] and found["is_base"] and found["unharmed"] and found["follows"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tp2_sp_to_pp2", "ep2_to_cp2", "shared_dp2_to_tp2_sp_ep2", "vocabulary_dp2_to_tp2"])
def test_a_checkpoint_loads_under_another_layout(double, case):
    expected, found = double[1][case]
    for step, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        assert got["train/learning_rate"] == wanted["train/learning_rate"]
        assert got["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-6)
        # Adam makes a step of full size of a gradient that is rounding alone, and the next gradient tells.
        near = 1e-3 if step else 1e-5
        assert got["train/gradient_norm"] == pytest.approx(wanted["train/gradient_norm"], rel=near)


@pytest.mark.slow
def test_exports_of_a_checkpoint_are_the_live_policy_and_its_adapters(paths, tmp_path):
    _run(2, "save_for_export", paths["moe"], tmp_path)
    for function, name, base in (("export_checkpoint", "merged", ""), ("export_adapters", "adapters", ", 'base'")):
        code = [
            "from pathlib import Path",
            "from actor import checkpoint_policy",
            "from rlpipe.config.actor import ActorConfig",
            "from rlpipe.shared.policy_facts import PolicyFacts",
            "lora = {'rank': 3, 'targets': ['all-linear'], 'experts': 'shared', 'init': 'gaussian'}",
            "actor = ActorConfig.model_validate({'processes': 2, 'dtype': 'float32', 'lora': lora})",
            "facts = PolicyFacts('r', 2, {}, 'card')",
            f"paths = [Path(one) for one in {[str(checkpoint_path(tmp_path, 2)), str(tmp_path / name)]}]",
            f"checkpoint_policy.{function}(*paths, Path({str(paths['moe'])!r}), actor, facts{base})",
        ]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, "-c", "\n".join(code)], env=environment, check=True)
    for exported, live in (("merged", "live"), ("adapters", "live_adapters")):
        one, other = read_tensors(tmp_path / exported), read_tensors(tmp_path / live)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
