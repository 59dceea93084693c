"""Charts: stacks add up, points that are not finite are left out, titles are escaped."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlpipe.monitoring.panels import GROUPS, Panel
from rlpipe.monitoring.report.advice import advice
from rlpipe.monitoring.report.axis import tick_text, value_axis
from rlpipe.monitoring.report.chart import Curve, chart
from rlpipe.monitoring.report.history import History
from rlpipe.monitoring.report.series import LIGHT, label, slot
from rlpipe.shared.phases import PHASES


def test_lines_leave_out_what_is_not_finite_and_escape_their_names():
    curve = Curve.of("loss <b>", [1, 2, 3], [1.0, float("nan"), 2.0])
    assert curve.points == ((1.0, 1.0), (3.0, 2.0))
    drawn = chart(Panel("a & b", ("loss",)), [curve])
    assert "loss &lt;b&gt;" in drawn and "a &amp; b" in drawn and "nan" not in drawn
    assert len(re.findall(r"<circle [^>]*r='2.2'", drawn)) == 2


def test_a_stack_reaches_the_sum_of_its_curves():
    one, other = Curve.of("one", [1, 2], [1.0, 2.0]), Curve.of("other", [1, 2], [3.0, 4.0])
    drawn = chart(Panel("seconds", ("one", "other"), "stacked"), [one, other])
    outlines = re.findall(r"<polygon class='f\d+' points='([^']+)'", drawn)
    corners = [[tuple(map(float, point.split(","))) for point in outline.split()] for outline in outlines]
    assert len(corners) == 2
    # The upper edge of the first is the lower edge of the second; pixels grow downwards.
    assert corners[0][:2] == list(reversed(corners[1][2:]))
    bottom, first, top = corners[0][2][1], corners[0][1][1], corners[1][1][1]
    assert (bottom - first) / (bottom - top) == 2.0 / 6.0 or abs((bottom - first) / (bottom - top) - 1 / 3) < 0.01


def test_one_iteration_is_drawn_too():
    for kind in ("lines", "stacked"):
        assert "NaN" not in chart(Panel("x", ("x",), kind), [Curve.of("x", [1], [0.0])])


def test_a_quiet_run_gets_no_advice():
    row = {"iteration": 1, "time/step_seconds": 10.0, "time/rollout_seconds": 3.0, "time/forward_seconds": 4.0}
    history = History("run", (row,), (), "")
    assert advice(history) == []
    assert advice(History("run", ({"iteration": 0},), (), "")) == []


@given(
    st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9),
    st.booleans(),
    st.sampled_from(["none", "share", "bytes", "seconds"]),
)
@example([5e-324], False, "none")
@example([-1e-300, 1e-300], False, "bytes")
def test_ticks_are_round_hold_all_values_and_read_differently(values, from_zero, unit):
    axis = value_axis(values, from_zero, unit)
    span = 1e-6 * (axis.high - axis.low)
    assert axis.low - span <= min(values) and axis.high + span >= max(values)
    assert 2 <= len(axis.ticks) <= 7
    step = axis.ticks[1] - axis.ticks[0]
    if unit == "none" and step >= 1e-3 and max(map(abs, axis.ticks)) < 1e4:
        texts = [tick_text(tick, axis, unit) for tick in axis.ticks]
        assert len(set(texts)) == len(texts)
        assert [float(text.replace(",", "")) for text in texts] == pytest.approx(list(axis.ticks), abs=step / 100)


def test_round_ticks_of_everyday_ranges():
    def texts(values, unit="none", from_zero=False):
        axis = value_axis(values, from_zero, unit)
        return [tick_text(tick, axis, unit) for tick in axis.ticks]

    assert texts([0.31, 0.87], "share") == ["0%", "50%", "100%"]
    assert texts([0.1, 7.3], "seconds", from_zero=True) == ["0", "2", "4", "6", "8"]
    assert texts([1177.0, 14146.0]) == ["0", "5k", "10k", "15k"]
    assert texts([41.0, 44.5]) == ["41", "42", "43", "44", "45"]


def test_values_are_there_under_the_pointer():
    drawn = chart(
        Panel("x", ("a", "b")), [Curve.of("a", [1, 2], [0.25, 0.5], 0), Curve.of("b", [2], [1.0], 1)], "share"
    )
    strips = drawn.split("<g class='at'>")[1:]
    assert len(strips) == 2
    assert "iteration 1<" in strips[0] and "a  25.0%" in strips[0] and "b  " not in strips[0]
    assert "a  50.0%" in strips[1] and "b  100.0%" in strips[1]


def test_long_runs_are_drawn_as_means_and_say_so():
    drawn = chart(Panel("x", ("x",)), [Curve.of("x", range(1000), [float(n % 2) for n in range(1000)])])
    assert "mean of 9 iterations a point" in drawn
    assert drawn.count("<g class='at'>") == 112


def test_every_series_of_the_dashboards_has_a_name_and_phases_have_colours_of_their_own():
    metrics = [metric for group in GROUPS for panel in group.panels for metric in panel.metrics]
    for metric in metrics:
        assert label(metric) and "/" not in label(metric).replace("TFLOP/s", "") and 0 <= slot(metric) < len(LIGHT)
    shown = [slot(f"time/{name}_seconds") for name in (*PHASES, "unaccounted")]
    assert len(set(shown)) == len(shown)


def test_advice_names_what_to_change_where_nothing_is_learned():
    rows = tuple({"iteration": number, "rollout/reward_mean": 0.0} for number in (1, 2, 3))
    assert advice(History("run", rows, (), ""))[0].startswith("No response was rewarded")
    rows = tuple({"iteration": number, "eval/x/accuracy": value} for number, value in enumerate((0.5, 0.9, 0.6)))
    (sentence,) = advice(History("run", rows, (), ""))
    assert "was 90.0% at iteration 1 and ended at 60.0%" in sentence


def test_groups_of_equal_rewards_are_told_as_a_share_of_the_groups():
    row = {"iteration": 1, "advantage/groups_count": 8, "rollout/equal_reward_groups_count": 6}
    found = advice(History("run", (row | {"rollout/samples_count": 64},), (), ""))
    assert [sentence.partition(" have")[0] for sentence in found] == ["75% of the groups"]
