"""Everything a step reports is the same under every parallel layout, and a skip is one on all ranks.

Loss and gradient norm over more layouts and models are compared in test_parity_layouts.py.
"""

import numpy as np
import pytest
from train_support import in_train_worker, run_processes, write_policy

LAYOUTS = {
    "tp2_sp": {"tensor": 2, "sequence": True},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "dp2": {},
    "dp2_ep2": {"expert": 2},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    paths = {name: write_policy(folder, name) for name in ("dense", "moe")}
    single = run_processes(1, in_train_worker, "policy_step_in_layouts", paths, {"one": {}, "one_ep": {}})[0]
    return single, run_processes(2, in_train_worker, "policy_step_in_layouts", paths, LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_metric_equals_the_one_of_a_single_process(results, layout):
    single, ranks = results
    reference = single["one_ep" if "ep2" in layout else "one"]
    for which in ("first", "second"):
        wanted = reference[which].metrics
        found = ranks[1][layout][which].metrics  # rank 1 is on the last stage of every layout
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=3e-4, abs=3e-5), (layout, which, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_poisoned_pack_skips_the_step_on_all_ranks_and_is_named_on_all(results, layout):
    single, ranks = results
    wanted = single["one"]["skipped"].culprit_sample_ids
    assert wanted == ("5/1", "5/2")
    for answer in ranks:
        assert not answer[layout]["skipped"].applied
        assert answer[layout]["skipped"].culprit_sample_ids == wanted
        assert answer[layout]["second"].applied


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_come_back_in_the_order_of_the_pack(results, layout):
    single, ranks = results
    wanted = single["one_ep" if "ep2" in layout else "one"]["logprobs"]
    if layout.startswith("dp2"):  # packs 0 and 2 on rank 0, packs 1 and 3 on rank 1
        parts = [ranks[index % 2][layout]["logprobs"][index // 2] for index in range(4)]
    else:
        parts = ranks[1][layout]["logprobs"][:4]
    for found, expected in zip(parts, wanted, strict=False):
        assert np.abs(expected).max() > 1
        assert np.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("layers", "interleaved"),
    [
        (4, {"pipeline": 2, "virtual_pipeline": 2}),
        pytest.param(8, {"pipeline": 4, "virtual_pipeline": 2}, marks=pytest.mark.slow),
    ],
    ids=["pp2_vpp2", "pp4_vpp2"],
)
def test_an_interleaved_pipeline_takes_fewer_packs_than_it_has_stages(tmp_path, layers, interleaved):
    path = write_policy(tmp_path, "dense", layers)
    (wanted,) = run_processes(1, in_train_worker, "few_packs", path, {})
    ranks = run_processes(interleaved["pipeline"], in_train_worker, "few_packs", path, interleaved, timeout_seconds=300)
    assert wanted["culprits"] == ("5/0", "5/5")
    for several in ("1", "2", "3", "4"):
        assert ranks[-1][several] == pytest.approx(wanted[several], rel=3e-4), several
    assert [rank["culprits"] for rank in ranks] == [wanted["culprits"]] * len(ranks)
