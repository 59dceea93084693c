"""Several GPUs train as one: loss and gradient norm of three steps, in float32."""

from typing import Any

import pytest
import torch
from model_support import DENSE, GDN_MOE, in_worker, write_checkpoint
from train_support import make_pack, run_processes

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs 2 GPUs of one machine, there are {torch.cuda.device_count()}"
)

MODELS = {model.name: model for model in (DENSE, GDN_MOE)}
LENGTHS = [[12, 20, 8], [16, 4, 28], [5, 30], [70, 3]]
OPTIMIZER = {"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}, "gdn_backend": "torch"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
    "ep2": {"expert": 2},
}
CASES = [(model, layout) for layout in LAYOUTS for model in MODELS if layout != "ep2" or model == "gdn_moe"]


def _run(processes: int, layouts: dict[str, dict[str, Any]], paths: dict[str, Any]) -> dict[tuple[str, str], Any]:
    packs = [[make_pack(lengths, seed, 200.0, 4) for seed, lengths in enumerate(LENGTHS)]] * 3
    work = {
        name: (OPTIMIZER | {"parallel": parallel}, {m: paths[m] for m in MODELS if (m, name) in CASES or name == "1"})
        for name, parallel in layouts.items()
    }
    answers = run_processes(processes, in_worker, ("train_layouts", work, packs))
    return {case: [answer[case] for (answer,) in answers] for case in answers[0][0]}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    paths = {name: write_checkpoint(model, folder) for name, model in MODELS.items()}
    return _run(1, {"1": {}}, paths), _run(2, LAYOUTS, paths)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_two_gpus_train_as_one(results, model, layout):
    single, two = results
    reference, answers = single[model, "1"][0], two[model, layout]
    for answer in (reference, *answers):
        assert not isinstance(answer, str), answer
    for (loss, norm), (wanted_loss, wanted_norm) in zip(answers[-1], reference, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-3)
        assert norm == pytest.approx(wanted_norm, rel=5e-3)
