"""Memory is taken from a device when that is done with it."""

from pathlib import Path

from engine_worker import answer_of

WORKER = Path(__file__).with_name("memory_pause_worker.py")


def test_a_device_is_waited_for_before_each_part_of_its_memory_goes(tmp_path):
    order = answer_of(WORKER, tmp_path)
    taken = ["unmap kv_cache", "copy buffers", "unmap weights", "unmap cuda_graph"]
    assert [step for step in order if step != "wait"] == taken
    for at, step in enumerate(order):
        assert not step.startswith("unmap") or order[at - 1] == "wait", order
