"""An actor that gives its device memory back trains on, bit by bit, as if it had kept it."""

import pytest
from train_support import in_module_worker, run_processes, write_policy

from rlpipe.config.actor import OptimizerConfig

SCHEDULE = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
HALF = SCHEDULE.model_copy(update={"cpu_offload_fraction": 0.5, "moments_dtype": "bfloat16"})
ONE = {
    "dense": ("dense", {"optimizer": SCHEDULE, "actor": {}}),
    "moe_bfloat16": ("moe", {"optimizer": SCHEDULE, "actor": {"dtype": "bfloat16"}}),
    "half_of_the_optimizer_on_the_device": ("dense", {"optimizer": HALF, "actor": {"dtype": "bfloat16"}}),
    "streamed": (
        "moe",
        {"optimizer": SCHEDULE, "streamed": True, "actor": {"dtype": "bfloat16"}},
    ),
    "half_of_them": ("dense", {"optimizer": HALF, "streamed": True, "actor": {}}),
    "frozen_embedding": ("tied", {"optimizer": HALF, "actor": {"frozen_parameters": ["embed_tokens"]}}),
}
TWO = {
    "moe_dp2": ("moe", {"optimizer": SCHEDULE, "actor": {"dtype": "bfloat16"}}),
    "streamed_dp2": ("moe", {"optimizer": SCHEDULE, "streamed": True, "actor": {"dtype": "bfloat16"}}),
    "moe_ep2": ("moe", {"optimizer": SCHEDULE, "actor": {"parallel": {"expert": 2}}}),
    "dense_pp2": ("tied", {"optimizer": HALF, "actor": {"parallel": {"pipeline": 2}}}),
}
CASES = [(1, name) for name in ONE] + [(2, name) for name in TWO]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    return {name: write_policy(folder, name) for name in ("dense", "moe", "tied")}


@pytest.fixture(scope="module")
def results(policies, tmp_path_factory):
    found = {}
    for count, cases in ((1, ONE), (2, TWO)):
        arguments = {name: (policies[policy], options) for name, (policy, options) in cases.items()}
        folder = tmp_path_factory.mktemp("files")
        ranks = run_processes(count, in_module_worker, "device_memory_workers", "all_cases", arguments, folder)
        found |= {(count, name): [rank[name] for rank in ranks] for name in cases}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_on_the_device(results, case):
    assert [rank["left_bytes"] for rank in results[case]] == [0] * case[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_come_back_bit_by_bit(results, case):
    for rank in results[case]:
        starts = [before for before, _ in rank["bits"]]
        assert starts[0] != starts[1] != starts[2]
        assert all(before == restored for before, restored in rank["bits"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_if_memory_had_been_kept(results, case):
    for rank in results[case]:
        assert all(plain == freed for plain, freed in rank["metrics"])
        assert rank["logprobs"][0] == rank["logprobs"][1]
        assert rank["final"][0] == rank["final"][1]
        assert rank["optimizer"][0] and rank["optimizer"][0] == rank["optimizer"][1]


def test_calls_that_need_what_was_freed_are_refused(policies, tmp_path):
    (found,) = run_processes(1, in_module_worker, "device_memory_workers", "refused_calls", policies["dense"], tmp_path)
    assert {name.split()[1] for name, error in found.items() if "holds nothing" in error} == {
        *("train", "logprobs", "set_reference", "reset_optimizer", "save", "load")
    }
    assert [name for name, error in found.items() if "only its weights" in error] == ["weights train"]
    assert "call ActorGroup.keep_resident('all') first" in found["weights train"]
    assert not found["all train"]


def test_a_call_that_finds_no_room_says_what_takes_it_and_what_to_set():
    (found,) = run_processes(1, in_module_worker, "device_memory_workers", "short_of_memory")
    assert found == (
        "train on rank 3 ran out of device memory beside 0.0 GB of the actor's tensors, 38.4 of them optimizer states: "
        "lower actor.max_tokens_per_gpu (16,896) or actor.optimizer.device_cache_gigabytes (as there is room), or set "
        "actor.recompute.granularity to full (CUDA out of memory. Tried to allocate 620.00 MiB.)"
    )


def test_memory_of_gradients_stays_where_few_states_go_for_it(policies):
    (held,) = run_processes(1, in_module_worker, "device_memory_workers", "held_beside_engines", policies["dense"])
    few, all_slots = held["all but a quarter of gradients"][1], held["nothing"][1]
    assert 3 < few < all_slots
    assert held == {
        "everything": ([], 0, 0),
        "all tensors": ([True], 0, 0),
        "all but three slots": ([True], 3, 3),
        "all but a quarter of gradients": ([True], few, few),
        "all but more": ([True, False], 0, 0),
        "nothing": ([True, False], all_slots, all_slots),
        "five slots, and no weights": ([True, False], all_slots, all_slots - 5),
    }
