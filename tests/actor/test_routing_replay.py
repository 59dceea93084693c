"""Tokens go to the experts that a pack names, in every layout, also where layers are computed again."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model_support import GDN_MOE, MOE, in_worker, write_checkpoint
from test_parity_layouts import LENGTHS, OPTIMIZER, TP2SP
from train_support import make_pack, run_processes

from rlpipe.shared.pack import Pack

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_sp": {"parallel": TP2SP},
    "pp2": {"parallel": {"pipeline": 2}},
    "ep2_cp2": {"parallel": {"expert": 2, "context": 2}},
    "dp2_full_recompute": {"recompute": {"granularity": "full"}},
}
MODELS = (MOE, GDN_MOE)


def _routed(pack: Pack, seed: int) -> Pack:
    generator = np.random.default_rng(seed)
    chosen = np.argsort(generator.random((pack.padded_tokens, 4, 4)), axis=-1)[..., :2]
    return replace(pack, routes=chosen.astype(np.int16))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    return {model.name: write_checkpoint(model, folder) for model in MODELS}


def _train(count: int, layouts: dict[str, dict[str, Any]], packs: list[Pack], paths) -> dict[tuple[str, str], Any]:
    work = {name: (OPTIMIZER | options, paths) for name, options in layouts.items()}
    answers = run_processes(count, in_worker, ("train_layouts", work, [packs] * 2))
    return {case: answers[-1][0][case] for case in answers[0][0]}


@pytest.mark.slow
def test_given_routes_train_alike_in_every_layout(paths):
    plain = [make_pack(lengths, seed, 200.0, 4) for seed, lengths in enumerate(LENGTHS)]
    routed = [_routed(pack, seed) for seed, pack in enumerate(plain)]
    single = _train(1, {"1": {}}, routed, paths)
    unrouted = _train(1, {"1": {}}, plain, paths)
    several = _train(2, LAYOUTS, routed, paths)
    for model in paths:
        assert single[model, "1"][0][0] != pytest.approx(unrouted[model, "1"][0][0], abs=1e-4)
        for layout in LAYOUTS:
            for found, wanted in zip(several[model, layout], single[model, "1"], strict=True):
                assert found == pytest.approx(wanted, rel=3e-4, abs=3e-5, nan_ok=True)


def test_the_routers_own_choices_replayed_change_nothing(paths):
    pack = make_pack([12, 20, 8], 0, 200.0, 4)
    ((results,),) = run_processes(1, in_worker, ("replay_own_routes", paths, pack))
    for model, (free, replayed) in results.items():
        np.testing.assert_allclose(replayed, free, atol=1e-6, err_msg=model)
