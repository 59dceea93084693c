"""A scheduler that collects garbage does not look through SGLang, during which no token would be made."""

from pathlib import Path

from engine_worker import answer_of

WORKER = Path(__file__).with_name("collection_worker.py")


def test_a_scheduler_looks_for_garbage_but_not_among_what_it_imported(tmp_path):
    enabled, looked_at, put_aside = answer_of(WORKER, tmp_path)
    assert enabled
    assert put_aside > 100_000 and looked_at < put_aside / 100, (looked_at, put_aside)
