"""Rotary positions of text are SGLang's, and take no work for each request."""

from pathlib import Path

from engine_worker import answer_of

WORKER = Path(__file__).with_name("text_positions_worker.py")


def test_positions_are_those_of_sglang_and_text_takes_no_work_for_each_request(tmp_path):
    alone, ours = answer_of(WORKER, tmp_path)
    for batch, (positions, dtype, operations) in alone.items():
        assert ours[batch][:2] == [positions, dtype], batch
        assert (ours[batch][2] == operations) == batch.startswith("image"), batch
    for mode in ("DECODE", "EXTEND", "MIXED"):
        assert ours[f"many {mode}"][2] == ours[f"few {mode}"][2] < 4
        assert alone[f"image {mode}"][0][0] != alone[f"image {mode}"][0][1]
