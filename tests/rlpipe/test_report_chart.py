"""Charts: stacks add up, points that are not finite are left out, titles are escaped."""

import re

from rlpipe.monitoring.panels import Panel
from rlpipe.monitoring.report.advice import advice
from rlpipe.monitoring.report.chart import Curve, chart
from rlpipe.monitoring.report.history import History


def test_lines_leave_out_what_is_not_finite_and_escape_their_names():
    curve = Curve.of("loss <b>", [1, 2, 3], [1.0, float("nan"), 2.0])
    assert curve.points == ((1.0, 1.0), (3.0, 2.0))
    drawn = chart(Panel("a & b", ("loss",)), [curve])
    assert "loss &lt;b&gt;" in drawn and "a &amp; b" in drawn and "nan" not in drawn
    assert drawn.count("<circle") == 2


def test_a_stack_reaches_the_sum_of_its_curves():
    one, other = Curve.of("one", [1, 2], [1.0, 2.0]), Curve.of("other", [1, 2], [3.0, 4.0])
    drawn = chart(Panel("seconds", ("one", "other"), "stacked"), [one, other])
    outlines = re.findall(r"<polygon points='([^']+)'", drawn)
    corners = [[tuple(map(float, point.split(","))) for point in outline.split()] for outline in outlines]
    assert len(corners) == 2
    # The upper edge of the first is the lower edge of the second; pixels grow downwards.
    assert corners[0][:2] == list(reversed(corners[1][2:]))
    bottom, first, top = corners[0][2][1], corners[0][1][1], corners[1][1][1]
    assert (bottom - first) / (bottom - top) == 2.0 / 6.0 or abs((bottom - first) / (bottom - top) - 1 / 3) < 0.01


def test_one_iteration_is_drawn_too():
    for kind in ("lines", "stacked"):
        assert "NaN" not in chart(Panel("x", ("x",), kind), [Curve.of("x", [1], [0.0])])


def test_a_quiet_run_gets_no_advice_but_where_the_time_goes():
    row = {"iteration": 1, "time/step_seconds": 10.0, "time/rollout_seconds": 3.0, "time/forward_seconds": 4.0}
    history = History("run", (row,), (), "")
    assert advice(history) == ["forward is 40% of the step."]
    assert advice(History("run", ({"iteration": 0},), (), "")) == []
