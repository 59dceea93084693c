"""Memory of devices that engines share: when it may be taken from one, and what if unequal amounts are free."""

from pathlib import Path

from engine_worker import answer_of

from rollout.engine_environment import engine_environment

WORKER = Path(__file__).with_name("memory_pause_worker.py")


def test_a_device_is_waited_for_before_each_part_of_its_memory_goes(tmp_path):
    order = answer_of(WORKER, tmp_path)
    taken = ["unmap kv_cache", "copy buffers", "unmap weights", "unmap cuda_graph"]
    assert [step for step in order if step != "wait"] == taken
    for at, step in enumerate(order):
        assert not step.startswith("unmap") or order[at - 1] == "wait", order


def test_an_engine_starts_where_its_gpus_have_unequal_amounts_free(tmp_path):
    """As beside an actor that one of them holds more of."""
    with_our_variables, without = answer_of(WORKER.with_name("memory_balance_worker.py"), tmp_path)
    assert with_our_variables == "starts"
    assert "memory capacity is unbalanced" in without
    environments = [engine_environment(device, 2, tmp_path, {}) for device in ("cpu", "cuda")]
    assert {found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] for found in environments} == {"false"}
