"""Reward, held-out accuracy and the phase split over the iterations, as one figure."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rlpipe.monitoring.report.chart import MOST_POINTS, means_of
from rlpipe.monitoring.report.history import History
from rlpipe.monitoring.report.page import taken_phases
from rlpipe.monitoring.report.series import LIGHT, held_out, label, phase_label, slot, text, unit


def draw(history: History) -> Figure:
    """Panels side by side, without rewards for a supervised run, which has none; the caller saves the figure."""
    drawn = [_draw_losses] if _is_supervised(history) else [_draw_rewards, _draw_held_out]
    figure = Figure(figsize=(5.0 * len(drawn) + 5.0, 4.5), layout="constrained")
    for axes, draw_panel in zip(figure.subplots(1, len(drawn) + 1), [*drawn, _draw_phases], strict=True):
        draw_panel(axes, history)
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    figure.suptitle(history.name)
    return figure


def _is_supervised(history: History) -> bool:
    return bool(history.series("train/loss")[1]) and not history.series("rollout/reward_mean")[1]


def _draw_losses(axes: Axes, history: History) -> None:
    for name in held_out(history.names("eval/")):
        _draw_evaluated(axes, history, name)
    iterations, values = history.series("train/loss")
    axes.plot(iterations, values, linestyle=":", color=_color("train/loss"), label="trained")
    axes.set_title("loss, nats per token")
    axes.legend(loc="best")


def _draw_rewards(axes: Axes, history: History) -> None:
    iterations, means = history.series("rollout/reward_mean")
    both = [row for row in history.rows if "rollout/reward_mean" in row and "rollout/reward_std" in row]
    low = [row["rollout/reward_mean"] - row["rollout/reward_std"] for row in both]
    high = [row["rollout/reward_mean"] + row["rollout/reward_std"] for row in both]
    color = _color("rollout/reward_mean")
    axes.fill_between(
        [row["iteration"] for row in both], low, high, color=color, alpha=0.15, label="± standard deviation"
    )
    axes.plot(iterations, means, color=color, marker="." if len(means) <= MOST_POINTS else "", label="mean")
    axes.set_title("reward of sampled responses")
    axes.legend(loc="best")


def _draw_held_out(axes: Axes, history: History) -> None:
    """Accuracy, or reward where a grader gives numbers alone."""
    names = held_out(history.names("eval/"))
    for name in names:
        _draw_evaluated(axes, history, name)
    iterations, values = history.series("rollout/accuracy")
    if values:
        axes.plot(iterations, values, linestyle=":", color=_color("rollout/accuracy"), label=label("rollout/accuracy"))
    if all(unit(name) == "share" for name in names):
        axes.set_ylim(0, 1.08)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_title("accuracy")
    else:
        axes.set_title("held-out reward")
    if axes.lines:  # neither evaluation nor a grader that tells right from wrong: nothing to name
        axes.legend(loc="best")


def _draw_evaluated(axes: Axes, history: History, name: str) -> None:
    """The metric of an evaluation set, its first and last value written out."""
    iterations, values = history.series(name)
    axes.plot(iterations, values, marker="o", color=_color(name), label=label(name))
    for place in (0, -1):
        told = text(values[place], unit(name))
        axes.annotate(told, (iterations[place], values[place]), (0, 6), textcoords="offset points")


def _draw_phases(axes: Axes, history: History) -> None:
    rows = history.trained
    together = math.ceil(len(rows) / MOST_POINTS) or 1  # drawing a bar takes milliseconds
    width = together if together > 1 else 0.85  # gaps between many bars are a pattern that means nothing
    bottom = [0.0] * math.ceil(len(rows) / together)
    for phase in taken_phases(history):
        metric = f"time/{phase}_seconds"
        bars = means_of([(row["iteration"], row.get(metric, 0.0)) for row in rows], together)
        places, seconds = zip(*bars, strict=True)
        axes.bar(places, seconds, bottom=bottom, width=width, color=_color(metric), label=phase_label(phase))
        bottom = [below + value for below, value in zip(bottom, seconds, strict=True)]
    axes.set_title("seconds of each phase" + (f", means of {together} iterations" if together > 1 else ""))
    axes.set_ylabel("seconds")
    if axes.patches:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _color(metric: str) -> str:
    return LIGHT[slot(metric)]
