"""Requests are drawn with filters as long as one of their batch asks for it, in SGLang's own batches."""

from pathlib import Path

from engine_worker import answer_of

WORKER = Path(__file__).with_name("sampling_kinds_worker.py")


def test_a_filtered_request_that_has_ended_slows_no_other(tmp_path):
    found = answer_of(WORKER, tmp_path)
    assert found.pop("plain") == [False, False, False, 2]
    assert found == dict.fromkeys(("greedy", "top_p", "top_k"), [True, True, False, 2])
