"""Whole runs as benchmarks start them."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class EnoughRowsError(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_is_cut_off_leaves_no_checkpoint(tmp_path, monkeypatch):
    """Of a large policy it would fill the disk that the next benchmark needs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from train_run import train

    def enough(row: dict[str, float]) -> None:
        if "perf/rollout_seconds" in row:  # of an iteration, after which there is something to save
            raise EnoughRowsError

    settings = ["run.iterations=50", "warm_start=null", "eval.datasets=[]", "checkpoint.interval_iterations=0"]
    with pytest.raises(EnoughRowsError):
        train("configs/demo/arithmetic.yaml", tmp_path, "cut", settings, on_row=enough)
    assert (tmp_path / "cut" / "metrics.jsonl").exists()
    assert not list((tmp_path / "cut" / "checkpoints").glob("*"))
