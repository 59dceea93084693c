"""Every parameter's gradient under TP, SP, CP and EP is that of one process; sequences of a pack never mix."""

import numpy as np
import pytest
from model_support import (
    DENSE,
    GDN,
    GDN_MOE,
    MOE,
    TinyModel,
    add_mtp,
    in_worker,
    mtp_answer,
    write_checkpoint,
)
from train_support import make_pack, run_processes

MANY_GROUPS = TinyModel("few_kv", "qwen3_5_moe_text", GDN_MOE.changes | {"num_key_value_heads": 1})
MODELS = {model.name: model for model in (DENSE, MOE, GDN, GDN_MOE, MANY_GROUPS)}
TP2SP = {"tensor": 2, "sequence": True}
MTP = {"train_mtp": True, "mtp_loss_weight": 1.0}
LAYOUTS = {
    "tp2": ({"parallel": {"tensor": 2}}, ("dense", "gdn")),
    "tp2_sp": ({"parallel": TP2SP}, ("dense", "moe", "gdn", "gdn_moe", "few_kv")),
    "tp2_sp_ep2": ({"parallel": TP2SP | {"expert": 2}}, ("moe", "gdn_moe")),
    "cp2": ({"parallel": {"context": 2}}, ("dense", "moe", "gdn", "gdn_moe")),
    "cp2_mtp": ({"parallel": {"context": 2}, **MTP}, ("mtp",)),
    "tp2_sp_ep2_mtp": ({"parallel": TP2SP | {"expert": 2}, **MTP}, ("mtp",)),
    "cp2_ep2": ({"parallel": {"context": 2, "expert": 2}}, ("moe", "gdn_moe")),
}
CASES = [(model, layout) for layout, (_, models) in LAYOUTS.items() for model in models]
PACK = make_pack([12, 70, 4, 33], 2, 1.0, 4)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("gradients")
    found = {name: write_checkpoint(model, folder) for name, model in MODELS.items()}
    return found | {"mtp": add_mtp(found["gdn_moe"], folder / "mtp")}


def _gradients(layouts, paths):
    work = {name: (options, {m: paths[m] for m in models}) for name, (options, models) in layouts.items()}
    return ("gradients_of_layouts", work, PACK)


@pytest.fixture(scope="module")
def one_process(paths):
    """Gradients, leaks between sequences, and rows of logits."""
    gradients = _gradients({"1": ({}, tuple(MODELS)), "1_mtp": (MTP, ("mtp",))}, paths)
    leaks = ("sequence_leaks", {name: paths[name] for name in ("dense", "gdn_moe")}, [1, 2, 63, 64, 65, 127])
    rows = ("logit_rows_of_mtp", paths["mtp"], PACK, 7)
    return run_processes(1, in_worker, gradients, leaks, rows)[0]


@pytest.fixture(scope="module")
def two_processes(paths):
    """Per rank: gradients (rank 0 has them), and the gradient of a gather."""
    return run_processes(2, in_worker, _gradients(LAYOUTS, paths), ("gather_gradient",))


@pytest.fixture(scope="module")
def single(one_process):
    return one_process[0]


@pytest.fixture(scope="module")
def two(two_processes):
    return two_processes[0][0]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_gradient_is_that_of_one_process(single, two, model, layout):
    wanted, found = single[model, "1_mtp" if model == "mtp" else "1"], two[model, layout]
    assert not isinstance(wanted, str), wanted
    assert not isinstance(found, str), found
    _assert_close(found, wanted)


def _assert_close(found, wanted):
    assert wanted.keys() == found.keys()
    errors = {
        name: float(np.linalg.norm(found[name] - gradient) / max(np.linalg.norm(gradient), 1e-6))
        for name, gradient in wanted.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < 1e-4, f"{worst}: {errors[worst]}"


def test_multi_token_prediction_learns_as_its_definition_says(single, paths):
    found = single["mtp", "1_mtp"]
    assert not isinstance(found, str), found
    wanted = {name: gradient.numpy() for name, gradient in mtp_answer(paths["mtp"], [PACK])[1].items()}
    _assert_close({name: gradient for name, gradient in found.items() if name.startswith("mtp.")}, wanted)


def test_multi_token_prediction_makes_as_many_logits_at_once_as_is_set(one_process):
    assert one_process[2] == 7


def test_multi_token_prediction_leaves_the_policy_gradient_alone(single):
    with_mtp = {name: value for name, value in single["mtp", "1_mtp"].items() if not name.startswith("mtp.")}
    _assert_close(with_mtp, single["gdn_moe", "1"])


def test_the_gather_over_context_ranks_sums_gradients_of_all_ranks(two_processes):
    """A backward that keeps only the local slice would give each rank its own weight, 1 or 2, instead of 3."""
    assert [answer[1] for answer in two_processes] == [3.0, 3.0]


def test_no_sequence_touches_another(one_process):
    for name, (moved, leaked) in one_process[1].items():
        assert moved < 1e-5, name
        assert leaked == 0.0, name
