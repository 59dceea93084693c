"""Seeded draws as engines on GPUs make them, with SGLang's own sampler around them."""

from pathlib import Path

from engine_worker import answer_of

WORKER = Path(__file__).with_name("seeded_draw_worker.py")


def test_a_token_does_not_depend_on_filtered_requests_beside_it(tmp_path):
    drawn = answer_of(WORKER, tmp_path)
    assert drawn["together"] == drawn["alone"]
    plain, filtered, _, greedy = (drawn["ranks"][first::4] for first in range(4))
    assert max(plain) > 20 > max(filtered) and max(greedy) == 0
