"""Adapters are PEFT's: forward, gradients and steps of Adam equal those of `peft` on transformers, and so do files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_support import OPTIMIZER, LoraCase, peft_logprobs, peft_model, train_with_peft
from model_support import (
    DENSE,
    EXPERTS,
    GDN,
    GDN_MOE,
    HYBRID,
    MOE,
    SHARED,
    TinyModel,
    in_worker,
    read_tensors,
    write_checkpoint,
)
from train_support import make_pack, run_processes

STEPS = 20
PACKS = [make_pack(lengths, seed, 100.0) for seed, lengths in enumerate([[12, 20], [9]])]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ROUTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SIX_HEADS = {"head_dim": None, "num_attention_heads": 6}
NEXT_TARGETS = ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj")
NEXT = TinyModel("next", "qwen3_next", HYBRID | EXPERTS | SHARED)
CASES = [
    LoraCase(DENSE, ("q_proj", "v_proj", "up_proj", "embed_tokens", "lm_head"), settings={"use_rslora": True}),
    LoraCase(GDN_MOE, ATTENTION + FEED_FORWARD + DELTA_NET, ROUTED),
]
MORE = [
    LoraCase(DENSE, ATTENTION + FEED_FORWARD),
    LoraCase(TinyModel("qwen2", "qwen2", SIX_HEADS), ("k_proj", "o_proj")),
    LoraCase(TinyModel("llama", "llama", SIX_HEADS), ATTENTION, settings={"rank": 7}),
    LoraCase(MOE, ("q_proj", "v_proj"), ROUTED),
    LoraCase(MOE, ("o_proj",), ROUTED[:1]),
    LoraCase(GDN, ATTENTION + FEED_FORWARD + DELTA_NET),
    LoraCase(GDN, ("in_proj_z", "in_proj_a", "layers.2.mlp.down_proj")),
    LoraCase(NEXT, NEXT_TARGETS, (*ROUTED[1:], "mlp.shared_expert.up_proj.weight")),
]


@dataclass(frozen=True)
class Answers:
    """Where the cases' files are, and what PEFT (`wanted`) and the actor (`found`) say of each."""

    folder: Path
    bases: dict[str, Path]
    wanted: dict[str, Any]
    found: dict[str, Any]


def _answers(cases: list[LoraCase], folder: Path) -> Answers:
    bases = {case.model.name: write_checkpoint(case.model, folder) for case in cases}
    wanted, work = {}, {}
    for case in cases:
        model = peft_model(bases[case.model.name], case)
        model.save_pretrained(folder / "start" / case.name)
        wanted[case.name] = train_with_peft(model, PACKS, STEPS)
        lora = case.lora(folder / "start" / case.name)
        work[case.name] = bases[case.model.name], {"lora": lora, "optimizer": OPTIMIZER}
    found = run_processes(1, in_worker, ("lora_workers.follow_peft", work, PACKS, STEPS, folder / "out"))[0][0]
    return Answers(folder, bases, wanted, found)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory):
    return _answers(CASES, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def more_answers(tmp_path_factory: pytest.TempPathFactory):
    return _answers(MORE, tmp_path_factory.mktemp("more_lora"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_and_files_equal_peft(answers, case):
    _assert_equal(answers, case)
    _assert_files_are_the_policy(answers, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_training_and_files_of_other_families_equal_peft(more_answers, case):
    _assert_equal(more_answers, case)
    _assert_files_are_the_policy(more_answers, case)


def _assert_equal(answers: Answers, case: LoraCase) -> None:
    own, theirs = answers.found[case.name], answers.wanted[case.name]
    assert not isinstance(own, str), own
    assert abs(own["logprobs"] - theirs["logprobs"]).max() < 1e-5
    assert own["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    for kind, expected in (("gradients", theirs["gradients"]), ("trained", theirs["adapters"])):
        tensors = read_tensors(answers.folder / "out" / case.name / kind)
        # PEFT also saves an embedding and a head that it adapts.
        expected = {name: value for name, value in expected.items() if not name.endswith(".base_layer.weight")}
        assert tensors.keys() == expected.keys()
        errors = {name: _relative(tensors[name], expected[name]) for name in expected}
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < 2e-5, f"{kind} {worst}: {errors[worst]}"
        assert sum(tensor.numel() for tensor in tensors.values()) == own["trained"]


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-3))


def _assert_files_are_the_policy(answers: Answers, case: LoraCase) -> None:
    """The merged weights of the start for transformers, and the adapters of the end for PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, found = answers.folder / "out" / case.name, answers.found[case.name]
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(answers.bases[case.model.name], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, out / "trained")
    with torch.no_grad():
        start = peft_logprobs(merged, PACKS[0]).numpy() * PACKS[0].loss_mask
        losses = [-(peft_logprobs(adapted, pack) * torch.from_numpy(pack.loss_weights)).sum() for pack in PACKS]
    assert abs(start - found["logprobs"]).max() < 1e-5
    assert float(sum(losses)) == pytest.approx(found["after"], abs=1e-5)
