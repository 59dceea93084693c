"""Several GPUs train as one: loss and gradient norm of three steps, in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_support import DENSE, GDN_MOE, in_worker, write_checkpoint
from train_support import make_pack, run_processes

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs of one machine, there are {torch.cuda.device_count()}"
)

HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # tensor and context parallelism both divide them
MODELS = {model.name: model for model in (DENSE, replace(GDN_MOE, changes=GDN_MOE.changes | HEADS))}
LENGTHS = [[12, 20, 8], [16, 4, 28], [5, 30], [70, 3]]
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}, "gdn_backend": "torch"}
TP2SP = {"tensor": 2, "sequence": True}
TWO: dict[str, dict[str, Any]] = {
    "tp2_sp": TP2SP,
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
    "ep2": {"expert": 2},
}
FOUR: dict[str, dict[str, Any]] = {
    "tp2_sp_pp2": TP2SP | {"pipeline": 2},
    "tp2_sp_cp2": TP2SP | {"context": 2},
    "cp2_pp2": {"context": 2, "pipeline": 2},
    "tp2_sp_ep4": TP2SP | {"expert": 4},
    "cp2_ep4": {"context": 2, "expert": 4},
}


def _cases(layouts: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(model, name) for name, layout in layouts.items() for model in MODELS if _suits(model, layout)]


def _suits(model: str, layout: dict[str, Any]) -> bool:
    return model == "gdn_moe" or "expert" not in layout


def _run(processes: int, layouts: dict[str, dict[str, Any]], paths: dict[str, Any]) -> dict[tuple[str, str], Any]:
    packs = [[make_pack(lengths, seed, 200.0, 4) for seed, lengths in enumerate(LENGTHS)]] * 3
    work = {
        name: (OPTIMIZER | {"parallel": parallel}, {m: paths[m] for m in MODELS if _suits(m, parallel)})
        for name, parallel in layouts.items()
    }
    answers = run_processes(processes, in_worker, ("train_layouts", work, packs))
    return {case: [answer[case] for (answer,) in answers] for case in answers[0][0]}


@pytest.fixture(scope="module", autouse=True)
def uncompiled():
    """Each layout has element-wise functions of other shapes, and they take minutes to compile; that they compute the
    same is tested by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    return {name: write_checkpoint(model, folder) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def single(paths):
    return _run(1, {"1": {}}, paths)


@pytest.fixture(scope="module")
def two(paths):
    return _run(2, TWO, paths)


@pytest.fixture(scope="module")
def four(paths):
    return _run(4, FOUR, paths)


@pytest.mark.parametrize(("model", "layout"), _cases(TWO))
def test_two_gpus_train_as_one(two, single, model, layout):
    _assert_equal(two[model, layout], single[model, "1"][0])


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason=f"needs 4 GPUs, there are {torch.cuda.device_count()}")
@pytest.mark.parametrize(("model", "layout"), _cases(FOUR))
def test_four_gpus_train_as_one(four, single, model, layout):
    _assert_equal(four[model, layout], single[model, "1"][0])


def _assert_equal(answers: list[Any], reference: Any) -> None:
    for answer in (reference, *answers):
        assert not isinstance(answer, str), answer
    for (norm, loss, _), (wanted_norm, wanted_loss, _) in zip(answers[-1], reference, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-3)
        assert norm == pytest.approx(wanted_norm, rel=5e-3)
