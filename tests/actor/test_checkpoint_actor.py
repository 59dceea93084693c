"""Saving and loading the whole training state with real Megatron checkpoints."""

import re
from dataclasses import replace

import pytest
from chosen_cases import chosen
from model_support import GDN, MOE, write_checkpoint
from train_support import in_module_worker, run_processes, write_policy

from tests.slow_cases import slow


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    few_experts = replace(MOE, name="few_experts", changes=MOE.changes | {"mlp_only_layers": [0, 1, 3]})
    tiny = {model.name: write_checkpoint(model, folder / "tiny") for model in (GDN, few_experts)}
    # Whose parameters lie over two data ranks, which share a row.
    odd = {"layers": 3, "hidden_size": 40, "intermediate_size": 72}
    uneven = {
        "uneven": write_policy(folder / "odd", "dense", **odd),
        "uneven_moe": write_policy(folder / "odd", "moe", **odd),
    }
    return tiny | uneven | {name: write_policy(folder, name) for name in ("dense", "moe")}


def worker(count, name, *arguments):
    return run_processes(count, in_module_worker, "checkpoint_workers", name, *arguments)


@pytest.fixture(scope="module")
def single(paths, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("checkpoints")
    return worker(1, "all_single_process_cases", paths, folder, {case for (case,) in chosen(request, "case")})[0]


@pytest.fixture(scope="module")
def double(paths, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("checkpoints")
    return worker(2, "all_two_process_cases", paths, folder, {case for (case,) in chosen(request, "case")})


@pytest.mark.parametrize(
    "case", ["float32", "streamed", *slow(["bfloat16", "frozen", "first", "dense_hybrid", "only_experts"])]
)
def test_continuing_from_a_checkpoint_gives_the_same_bits(single, case):
    _assert_exact(single[case])


@pytest.mark.parametrize(
    "case",
    [
        "pp2_vpp2",
        "pp2_adapters_of_one_stage",
        *slow(["dp2_moe_ep2", "pp2_frozen_stage", "dp2_one_norm", "pp2_vpp2_few_experts"]),
    ],
)
def test_two_processes_continue_with_the_same_bits(double, case):
    for rank in double:
        _assert_exact(rank[case])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_saving_and_loading_copy_no_states(count, tmp_path):
    """In host memory they are most of what a process has: the run would end with its first checkpoint. Of many tensors,
    as a policy has, since four are read at a time."""
    large = write_policy(tmp_path, "dense", layers=8, hidden_size=512, intermediate_size=2048)
    ranks = run_processes(
        count, in_module_worker, "checkpoint_workers", "memory_of_a_save", large, tmp_path, method="spawn"
    )
    states = sum(rank["states"] for rank in ranks)
    assert states > 300e6
    for rank in ranks:
        assert max(rank["saving"], rank["loading"]) < 0.4 * states, ranks


def test_an_update_waits_until_its_states_are_written(paths, tmp_path):
    (found,) = worker(1, "write_under_way", paths["dense"], tmp_path)
    assert found["order"] == ["written", "updated"]
    saved, expected = found["states"]
    assert saved == expected
    # With memory of its own each, so all are there after the first save, however quick one is.
    assert found["threads"] == 1 + found["files"] > 2


def test_a_reference_pass_beside_the_writer_changes_nothing_of_what_is_saved(paths, tmp_path):
    ((saved, expected),) = worker(1, "write_beside_a_reference_pass", paths["dense"], tmp_path)
    assert saved == expected


def test_what_slots_on_the_device_hold_alone_is_saved(single):
    saved, expected = single["in_slots"]
    assert saved == expected


def test_a_save_does_not_throw_away_the_one_that_is_under_way(single):
    assert single["in_a_row"] == ["iteration_00000001", "iteration_00000002"]


def _assert_exact(found):
    assert not found["appeared_early"]
    assert found["driver_state"] == {"position": [1, 2, 3]}
    for what in ("metrics", "weights", "reference", "counts", "drawn"):
        resumed, unbroken = found[what]
        assert resumed == unbroken, what
    assert "state.json" in found["files"]


@pytest.mark.parametrize(
    "case",
    [
        "dp2_to_tp2_sp",
        "dense_hybrid_pp2_to_tp2",
        *slow(["tp2_to_pp2", "moe_ep2_to_dp2", "moe_dp2_to_cp2", "only_experts_ep2_to_pp2"]),
    ],
)
def test_a_checkpoint_loads_under_another_layout(double, case):
    assert all(count > 0 for rank in double for count in rank["uneven"])
    expected, found = double[1][case]
    for wanted, got in zip(expected, found, strict=True):
        for name in ("train/loss", "train/gradient_norm", "train/learning_rate"):
            assert got[name] == pytest.approx(wanted[name], rel=2e-4), name


def test_newest_checkpoints_are_kept_and_unfinished_ones_ignored(single):
    case = single["damaged"]
    assert case["kept"] == [
        ["iteration_00000001"],
        ["iteration_00000001", "iteration_00000002"],
        ["iteration_00000002", "iteration_00000003"],
    ]
    assert case["with_abandoned"] == case["kept"][-1]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("missing", "iteration_00000009 is not a complete checkpoint"),
        ("unfinished", "is not a complete checkpoint: state.json is missing"),
        ("cut", r"__0_\d.distcp has \d+ bytes instead of \d+: use another checkpoint"),
        ("file_gone", r"__0_\d.distcp is missing: use another checkpoint"),
        ("overwritten", r"__0_\d.distcp is damaged \(the checksum differs\): use another checkpoint"),
        ("state", "state.json is damaged"),
        ("other_model", "holds a model with architecture .*the configured one has"),
        ("other_frozen", r"saved with frozen_parameters = \[\].* gives \['embed'\]: leave actor.frozen_parameters as"),
        ("other_dtype", "saved with dtype = float32, and the configuration gives bfloat16: leave actor.dtype as"),
        ("other_reference", "saved with reference = False.* leave algorithm.kl.coefficient"),
    ],
)
def test_damage_is_one_sentence(single, damage, sentence):
    message = single["damaged"][damage]
    assert re.search(sentence, message), message
    assert "\n" not in message


def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(single):
    case = single["full_disk"]
    assert len(case["errors"]) > 4
    for error in case["errors"]:
        assert re.match(r"saving .*iteration_00000002 failed with .* MB free there .*; older ones are whole", error)
        assert "\n" not in error and len(error) < 700
    assert case["left"] == [["iteration_00000001"]] * len(case["errors"])
    assert case["old_is_whole"]
    assert case["loaded"] == {"after": "space was freed"} and case["complete"] == ["iteration_00000002"]


def test_every_process_hears_of_a_damaged_file_before_anything_is_loaded(double):
    for rank in double:
        case = rank["one_damaged_file"]
        assert len(case["errors"]) >= 4
        for name, error in case["errors"]:
            assert f"{name} is damaged (the checksum differs): use another checkpoint" in error
        assert case["weights"][0] == case["weights"][1]
        assert case["afterwards"] == "loaded"


def test_no_flipped_bit_of_the_metadata_is_read(single):
    flipped = single["damaged"]["flipped"]
    assert len(flipped) > 10
    assert all("metadata.json is damaged (the checksum differs)" in message for message in flipped)
