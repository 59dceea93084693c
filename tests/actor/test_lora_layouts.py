"""Adapters train alike in every parallel layout: loss and gradient norm over three steps are those of one process."""

from typing import Any

import pytest
from lora_support import LoraCase, peft_model
from model_support import DENSE, GDN_MOE, MOE, in_worker, write_checkpoint
from train_support import make_pack, run_processes

pytestmark = pytest.mark.slow

LENGTHS = [[12, 20, 8], [16, 4, 28], [5, 30], [70, 3]]
PACKS = [make_pack(lengths, seed, 200.0, 4) for seed, lengths in enumerate(LENGTHS)]
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}}
TP2SP = {"tensor": 2, "sequence": True}
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
)
ROUTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES = {
    "dense": LoraCase(DENSE, PROJECTIONS[:7]),
    "dense_vocabulary": LoraCase(DENSE, ("q_proj", "up_proj", "embed_tokens", "lm_head")),
    "moe_shared": LoraCase(MOE, ("v_proj", "o_proj"), ROUTED, {"experts": "shared", "start_path": None}),
    "gdn_moe": LoraCase(GDN_MOE, PROJECTIONS, ROUTED),
    "gdn_moe_float8": LoraCase(GDN_MOE, PROJECTIONS, ROUTED, {"base": "float8"}),
}
EXPERTS = ("moe_shared", "gdn_moe")
TWO: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "tp2": (("dense_vocabulary",), {"parallel": {"tensor": 2}}),
    "tp2_sp_ep2": ((*EXPERTS, "gdn_moe_float8"), {"parallel": TP2SP | {"expert": 2}}),
    "pp2_vpp2_full_recompute": (
        ("gdn_moe",),
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "recompute": {"granularity": "full"}},
    ),
}
MORE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "tp2": (("dense",), {"parallel": {"tensor": 2}}),
    "tp2_sp": (tuple(CASES), {"parallel": TP2SP}),
    "pp2": (("dense_vocabulary", "gdn_moe"), {"parallel": {"pipeline": 2}}),
    "pp2_vpp2": (("gdn_moe",), {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "dp2_full_recompute": (("dense_vocabulary", *EXPERTS), {"recompute": {"granularity": "full"}}),
    "cp2": (("dense_vocabulary", "gdn_moe"), {"parallel": {"context": 2}}),
    "ep2": (EXPERTS, {"parallel": {"expert": 2}}),
}
FOUR: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "tp2_sp_pp2_full_recompute": (
        ("dense_vocabulary", "gdn_moe", "gdn_moe_float8"),
        {"parallel": TP2SP | {"pipeline": 2}, "recompute": {"granularity": "full"}},
    ),
    "cp2_dp2_ep4": ((*EXPERTS, "gdn_moe_float8"), {"parallel": {"context": 2, "expert": 4}}),
    "tp2_sp_dp2_ep2": (EXPERTS, {"parallel": TP2SP | {"expert": 2}}),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory):
    """Model folder and settings of `actor.lora` of each case; adapters begin with values that are not zero."""
    folder = tmp_path_factory.mktemp("lora_layouts")
    found = {}
    for name, case in CASES.items():
        base = write_checkpoint(case.model, folder)
        start = folder / "start" / name
        if case.settings.get("experts") != "shared":  # which PEFT does not have
            peft_model(base, case).save_pretrained(start)
        found[name] = base, case.lora(start)
    return found


def _run(processes: int, layouts: dict[str, tuple[tuple[str, ...], dict[str, Any]]], cases: dict[str, Any]):
    """(case, layout) -> per rank [(gradient norm, loss, nothing)]."""
    work = [(layout, options, name, *cases[name]) for layout, (names, options) in layouts.items() for name in names]
    answers = run_processes(processes, in_worker, ("lora_workers.train_layouts", work, OPTIMIZER, [PACKS] * 3))
    return {case: [answer[case] for (answer,) in answers] for case in answers[0][0]}


@pytest.fixture(scope="module")
def single(cases):
    return _run(1, {"1": (tuple(CASES), {})}, cases)


@pytest.fixture(scope="module")
def two(cases):
    return _run(2, TWO, cases)


@pytest.fixture(scope="module")
def more(cases):
    return _run(2, MORE, cases)


@pytest.fixture(scope="module")
def four(cases):
    return _run(4, FOUR, cases)


def _assert_equal(answers: list[Any], reference: list[Any]) -> None:
    for answer in [*answers, *reference]:
        assert not isinstance(answer, str), answer
    for (norm, loss), (wanted_norm, wanted_loss) in zip(answers[-1], reference[0], strict=True):
        assert loss == pytest.approx(wanted_loss, abs=3e-5)
        assert norm == pytest.approx(wanted_norm, rel=3e-4)
    for answer in answers:
        assert [norm for norm, _ in answer] == pytest.approx([norm for norm, _ in answers[-1]], rel=1e-6)


def _cases(layouts: dict[str, tuple[tuple[str, ...], dict[str, Any]]]) -> list[tuple[str, str]]:
    return [(name, layout) for layout, (names, _) in layouts.items() for name in names]


@pytest.mark.parametrize(("name", "layout"), _cases(TWO))
def test_two_processes_train_as_one(two, single, name, layout):
    _assert_equal(two[name, layout], single[name, "1"])


@pytest.mark.parametrize(("name", "layout"), _cases(MORE))
def test_two_processes_of_other_layouts_train_as_one(more, single, name, layout):
    _assert_equal(more[name, layout], single[name, "1"])


@pytest.mark.parametrize(("name", "layout"), _cases(FOUR))
def test_four_processes_train_as_one(four, single, name, layout):
    _assert_equal(four[name, layout], single[name, "1"])


@pytest.mark.parametrize("name", CASES)
def test_training_lowers_the_loss(single, name):
    losses = [loss for _, loss in single[name, "1"][0]]
    assert losses[2] < losses[0]
