"""Loss and gradient norm over three optimizer steps are those of one process, whatever the parallel layout."""

import math
from typing import Any

import pytest
from chosen_cases import chosen
from model_support import DENSE, GDN, GDN_MOE, MOE, TinyModel, add_mtp, in_worker, mtp_answer, write_checkpoint
from train_support import make_pack, run_processes

MODELS = {model.name: model for model in (DENSE, MOE, GDN, GDN_MOE)}
TIED = TinyModel("tied", "qwen3", {"tie_word_embeddings": True})
LENGTHS = [[12, 20, 8], [16, 4, 28], [5, 30], [70, 3]]
PACKS = [make_pack(lengths, seed, 200.0, 4) for seed, lengths in enumerate(LENGTHS)]
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}}
Layouts = dict[str, tuple[tuple[str, ...], dict[str, Any]]]
"""By name: the models that are trained in it, and settings of the actor."""

TP2SP = {"tensor": 2, "sequence": True}
MTP = {"train_mtp": True, "mtp_loss_weight": 0.5}
TWO: Layouts = {
    "tp2": (("dense", "gdn"), {"parallel": {"tensor": 2}}),
    "tp2_sp": (tuple(MODELS), {"parallel": TP2SP}),
    "pp2": (tuple(MODELS), {"parallel": {"pipeline": 2}}),
    "pp2_tied": (("tied",), {"parallel": {"pipeline": 2}}),
    "pp2_vpp2": (("dense", "gdn_moe"), {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "dp2": (tuple(MODELS), {}),
    "dp2_mtp": (("mtp",), MTP),
    "cp2": (tuple(MODELS), {"parallel": {"context": 2}}),
    "pp2_mtp": (("mtp",), MTP | {"parallel": {"pipeline": 2}}),
    "cp2_mtp": (("mtp",), MTP | {"parallel": {"context": 2}}),
    "ep2": (("moe", "gdn_moe"), {"parallel": {"expert": 2}}),
    "tp2_sp_ep2": (("moe", "gdn_moe"), {"parallel": TP2SP | {"expert": 2}}),
    "ep2_cp2": (("moe", "gdn_moe"), {"parallel": {"expert": 2, "context": 2}}),
    "dp2_full_recompute": (("gdn_moe",), {"recompute": {"granularity": "full"}}),
    "cp2_selective_recompute": (
        ("dense", "gdn_moe"),
        {"parallel": {"context": 2}, "recompute": {"granularity": "selective", "modules": ["core_attn"]}},
    ),
}
FOUR: Layouts = {
    "tp2_sp_pp2": (tuple(MODELS), {"parallel": TP2SP | {"pipeline": 2}}),
    "cp2_dp2": (("dense", "gdn"), {"parallel": {"context": 2}}),
    "cp2_dp2_ep4": (("moe", "gdn_moe"), {"parallel": {"context": 2, "expert": 4}}),
    "tp2_sp_dp2_ep2": (("moe", "gdn_moe"), {"parallel": TP2SP | {"expert": 2}}),
}


def _cases(layouts: Layouts) -> list[Any]:
    """Hybrids with experts have the layers of the two kinds that are left to the slow tests where there are both."""
    return [
        pytest.param(model, layout, marks=pytest.mark.slow if model in ("moe", "gdn") and "gdn_moe" in models else ())
        for layout, (models, _) in layouts.items()
        for model in models
    ]


def _selected(layouts: Layouts, request: pytest.FixtureRequest) -> Layouts:
    """Those that are to run, with their models."""
    wanted = chosen(request, "layout", "model")
    return {
        name: (found, options)
        for name, (models, options) in layouts.items()
        if (found := tuple(model for model in models if (name, model) in wanted))
    }


def _run(processes: int, layouts: Layouts, paths: dict[str, Any]):
    """(model, layout) -> per rank [(gradient norm, loss, multi-token-prediction loss)]; the last stage knows losses."""
    packs = [PACKS] * 3
    work = {name: (OPTIMIZER | options, {m: paths[m] for m in models}) for name, (models, options) in layouts.items()}
    answers = run_processes(processes, in_worker, ("train_layouts", work, packs))
    return {case: [answer[case] for (answer,) in answers] for case in answers[0][0]}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("layouts")
    found = {name: write_checkpoint(model, folder) for name, model in (MODELS | {"tied": TIED}).items()}
    return found | {"mtp": add_mtp(found["gdn_moe"], folder / "mtp")}


@pytest.fixture(scope="module")
def single(paths):
    return _run(1, {"1": ((*MODELS, "tied"), {}), "1_mtp": (("mtp",), MTP)}, paths)


@pytest.fixture(scope="module")
def two(paths, request):
    return _run(2, _selected(TWO, request), paths)


@pytest.fixture(scope="module")
def four(paths, request):
    return _run(4, _selected(FOUR, request), paths)


def _assert_equal(answers: list[Any], reference: list[Any]) -> None:
    for answer in [*answers, *reference]:
        assert not isinstance(answer, str), answer
    for (norm, *losses), (wanted_norm, *wanted_losses) in zip(answers[-1], reference[0], strict=True):
        assert losses == pytest.approx(wanted_losses, abs=3e-5, nan_ok=True)
        assert norm == pytest.approx(wanted_norm, rel=3e-4)
    for answer in answers:
        assert [norm for norm, *_ in answer] == pytest.approx([norm for norm, *_ in answers[-1]], rel=1e-6)


@pytest.mark.parametrize(("model", "layout"), _cases(TWO))
def test_two_processes_train_as_one(two, single, model, layout):
    _assert_equal(two[model, layout], single[model, "1_mtp" if model == "mtp" else "1"])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), _cases(FOUR))
def test_four_processes_train_as_one(four, single, model, layout):
    _assert_equal(four[model, layout], single[model, "1"])


@pytest.mark.parametrize("model", MODELS)
def test_training_lowers_the_loss(single, model):
    losses = [loss for _, loss, _ in single[model, "1"][0]]
    assert losses[2] < losses[0]


def test_the_loss_of_multi_token_prediction_is_the_one_of_its_definition(single, paths):
    (_, _, loss), *_ = single["mtp", "1_mtp"][0]
    assert loss == pytest.approx(mtp_answer(paths["mtp"], PACKS)[0], rel=1e-5)
    assert all(math.isnan(absent) for _, _, absent in single["gdn_moe", "1"][0])
