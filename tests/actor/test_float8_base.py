"""Frozen weights in 8 bits: training on them is training on the rounded model, which is close to the first one."""

import pytest
import torch
from lora_support import LoraCase, peft_model
from model_support import DENSE, GDN_MOE, in_worker, read_tensors, write_checkpoint
from train_support import make_pack, run_processes

from actor.layers.float8_weight import BLOCK_COLUMNS, pack, whole

PACKS = [make_pack(lengths, seed, 100.0) for seed, lengths in enumerate([[12, 20], [9]])]
PROJECTIONS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "in_proj_qkv", "out_proj")
ROUTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES = {"dense": LoraCase(DENSE, PROJECTIONS[:5]), "gdn_moe": LoraCase(GDN_MOE, PROJECTIONS, ROUTED)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("float8")


@pytest.fixture(scope="module")
def answers(folder):
    work = {}
    for name, case in CASES.items():
        base, start = write_checkpoint(case.model, folder), folder / "start" / name
        peft_model(base, case).save_pretrained(start)
        work[name] = base, case.lora(start), folder / "rounded" / name
    return run_processes(1, in_worker, ("float8_workers.rounded_and_plain", work, PACKS))[0][0]


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_rounded_model(answers, folder, name):
    answer = answers[name]
    assert not isinstance(answer, str), answer
    rounded, plain, first = answer["rounded"], answer["from_folder"], answer["first"]
    assert abs(rounded["logprobs"] - plain["logprobs"]).max() < 1e-6
    for found, wanted in zip(rounded["steps"], plain["steps"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    assert rounded["came_back"]
    assert rounded["frozen_bytes"] < 0.45 * first["frozen_bytes"]  # float32 here; embedding and head stay
    assert 1e-4 < abs(rounded["logprobs"] - first["logprobs"]).mean() < 0.2


@pytest.mark.parametrize("name", CASES)
def test_exports_are_the_rounded_model(answers, folder, name):
    assert not isinstance(answers[name], str), answers[name]
    before, after = (read_tensors(one) for one in (folder / CASES[name].model.name, folder / "rounded" / name))
    assert before.keys() == after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed
    assert not any(key.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight", "A_log")) for key in changed)
    for key in changed:
        assert float((before[key] - after[key]).norm() / before[key].norm()) < 0.04, key
        assert torch.equal(after[key], after[key].bfloat16().float()), key


@pytest.mark.parametrize("shape", [(3, 5), (7, 96), (2, 5, 100)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rounding_is_within_half_a_unit_of_e4m3(shape, size):
    torch.manual_seed(0)
    exact = size * torch.randn(shape)
    weight = torch.nn.Parameter(exact.clone(), requires_grad=False)
    pack(weight)
    assert weight.element_size() == 1
    assert weight.shape == exact.shape
    largest = torch.nn.functional.pad(exact, (0, -shape[-1] % BLOCK_COLUMNS)).unflatten(-1, (-1, BLOCK_COLUMNS))
    floor = largest.abs().amax(-1, keepdim=True).expand_as(largest).flatten(-2)[..., : shape[-1]] * 2.0**-16
    assert bool(((whole(weight) - exact).abs() <= exact.abs() * 2.0**-4 + floor).all())


def test_values_do_not_depend_on_where_a_rank_begins():
    torch.manual_seed(0)
    exact = torch.randn(8, 96)
    weight, part = (torch.nn.Parameter(one.clone(), requires_grad=False) for one in (exact, exact[:, 24:72]))
    pack(weight)
    pack(part)
    assert torch.equal(whole(weight)[:, 24:72], whole(part))
