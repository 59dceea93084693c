"""Rows over several iterations are work over time, warm-up is left out, and what is unknown is a dash."""

import pytest

from rlpipe.monitoring.report.history import History
from rlpipe.monitoring.report.table import performance_rows, performance_table, table_headers
from rlpipe.shared.errors import DataError


def _history(*rows):
    return History("run", tuple({"iteration": number, **row} for number, row in enumerate(rows)), (), "")


def _row(seconds, tokens, **more):
    return {
        "perf/actor_train_seconds": seconds,
        "perf/actor_tokens_per_second": tokens / seconds,
        "perf/actor_tokens_per_gpu_per_second": tokens / seconds / 4,
        "perf/actor_train_tflops_per_gpu": tokens / seconds / 1000,
        "perf/train_seconds": 2 * seconds,
        "time/step_seconds": 3 * seconds,
        "perf/tokens_per_gpu_per_second": tokens / (3 * seconds) / 5,
        **more,
    }


def test_rates_over_a_window_are_tokens_over_seconds_and_not_means_of_rates():
    history = _history({}, _row(100, 100), _row(10, 1000), _row(30, 1000), _row(10, 400))
    rows = dict(performance_rows(history, skip_until=1, window=2))
    assert list(rows) == ["[1]", "2", "3", "4", "last 2", "all 3"]
    assert rows["all 3"]["actor tok/s"] == pytest.approx(2400 / 50)
    assert rows["last 2"]["actor tok/s"] == pytest.approx(1400 / 40)
    assert rows["last 2"]["actor tok/s/GPU"] == pytest.approx(1400 / 40 / 4)
    assert rows["all 3"]["tok/s/GPU"] == pytest.approx(2400 / 150 / 5)
    assert rows["all 3"]["actor train s"] == pytest.approx(50 / 3)
    assert rows["all 3"]["train s"] == pytest.approx(100 / 3)
    assert rows["all 3"]["MFU"] is None
    assert dict(performance_rows(history, skip_until=0))["all 4"]["actor tok/s"] == pytest.approx(2500 / 150)


def test_the_text_is_aligned_and_a_missing_value_is_a_dash():
    lines = performance_table(_history({}, _row(1, 10), _row(1, 10, **{"perf/actor_train_mfu": 0.421}))).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(header in lines[0] for header in table_headers())
    assert lines[2].split()[-2:] == ["42.1%", "-"]


def test_a_run_of_warm_up_alone_has_no_table():
    with pytest.raises(DataError, match="no iteration after 1"):
        performance_rows(_history({}, _row(1, 10)))
