"""Line and stacked-area charts as SVG text, for a page that needs no network and no script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from statistics import fmean

from rlpipe.monitoring.panels import Panel
from rlpipe.monitoring.report.axis import Axis, iteration_axis, tick_text, value_axis
from rlpipe.monitoring.report.series import LIGHT, text

_WIDTH, _HEIGHT = 400, 224
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 34
MOST_POINTS = 120
_DOTS_UP_TO = 40
_TIP_LINE, _LETTER = 12.5, 5.3
_MOST_TIP_LINES = 12
_UNIT_NAMES = {"none": "", "bytes": "GiB", "count": "", "rank": "", "versions": "versions", "share": ""}

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One series over the iterations where it was logged; points that are not finite are left out.

    slot: number of its colour.
    """

    label: str
    points: tuple[Point, ...]
    slot: int = 0

    @classmethod
    def of(cls, label: str, iterations: Sequence[int], values: Sequence[float], slot: int = 0) -> "Curve":
        pairs = zip(iterations, values, strict=True)
        return cls(label, tuple((float(x), float(y)) for x, y in pairs if math.isfinite(y)), slot)


def chart(panel: Panel, curves: Sequence[Curve], unit: str = "none") -> str:
    """A figure element with title, drawing, values under the pointer, and legend. `curves` has at least one point."""
    thinned = max(math.ceil(len(curve.points) / MOST_POINTS) for curve in curves)
    curves = _distinct([replace(curve, points=means_of(curve.points, thinned)) for curve in curves])
    stacked = panel.kind == "stacked"
    levels = _stacked(curves) if stacked else [curve.points for curve in curves]
    xs = sorted({x for level in levels for x, _ in level})
    frame = _Frame(
        iteration_axis(xs[0], xs[-1]), value_axis([y for level in levels for _, y in level], stacked, unit), unit
    )
    marks = []
    for index, (curve, level) in enumerate(zip(curves, levels, strict=True)):
        below = (levels[index - 1] if index else [(x, 0.0) for x, _ in level]) if stacked else None
        marks.append(_mark(curve, level, below, frame))
    named = [_UNIT_NAMES.get(unit, unit), f"mean of {thinned} iterations a point" if thinned > 1 else ""]
    note = ", ".join(part for part in named if part)
    return (
        f"<figure><figcaption>{escape(panel.title)}</figcaption><p class='unit'>{escape(note) or '&nbsp;'}</p>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(panel.title, quote=True)}'>"
        f"{_axes(frame)}{''.join(marks)}{_hover(xs, curves, frame)}</svg>{_legend(curves, panel)}</figure>"
    )


@dataclass(frozen=True)
class _Frame:
    """From values to places of the drawing."""

    iterations: Axis
    values: Axis
    unit: str

    def x(self, value: float) -> float:
        return round(_LEFT + self.iterations.share(value) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - self.values.share(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _distinct(curves: Sequence[Curve]) -> list[Curve]:
    """In one chart no two series share a colour while there are colours left."""
    taken: set[int] = set()
    distinct = []
    for curve in curves:
        slots = [curve.slot, *range(len(LIGHT))]
        slot = next((slot for slot in slots if slot not in taken), curve.slot)
        taken.add(slot)
        distinct.append(replace(curve, slot=slot))
    return distinct


def means_of(points: Sequence[Point], count: int) -> tuple[Point, ...]:
    """Of each `count` points that follow each other."""
    if count == 1:
        return tuple(points)
    groups = [points[start : start + count] for start in range(0, len(points), count)]
    return tuple((fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups)


def _stacked(curves: Sequence[Curve]) -> list[list[Point]]:
    """Upper edges, each over the one before; an iteration that a curve lacks counts as 0."""
    xs = sorted({x for curve in curves for x, _ in curve.points})
    heights = dict.fromkeys(xs, 0.0)
    levels = []
    for curve in curves:
        values = dict(curve.points)
        heights = {x: heights[x] + values.get(x, 0.0) for x in xs}
        levels.append(list(heights.items()))
    return levels


def _mark(curve: Curve, level: Sequence[Point], below: Sequence[Point] | None, frame: _Frame) -> str:
    def path(points: Sequence[Point]) -> str:
        return " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)

    if below is not None and len(level) > 1:
        return f"<polygon class='f{curve.slot}' points='{path([*level, *reversed(below)])}'/>"
    if below is not None:
        ((x, high),), ((_, low),) = level, below
        top, height = frame.y(high), round(frame.y(low) - frame.y(high), 1)
        return f"<rect class='f{curve.slot}' x='{frame.x(x) - 40}' width='80' y='{top}' height='{height}'/>"
    dots = "".join(f"<circle class='f{curve.slot}' cx='{frame.x(x)}' cy='{frame.y(y)}' r='2.2'/>" for x, y in level)
    line = f"<polyline class='line s{curve.slot}' points='{path(level)}'/>"
    return line + (dots if len(level) <= _DOTS_UP_TO else "")


def _axes(frame: _Frame) -> str:
    parts = []
    for value in frame.values.ticks:
        y = frame.y(value)
        parts.append(f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y}' y2='{y}'/>")
        shown = tick_text(value, frame.values, frame.unit)
        parts.append(f"<text x='{_LEFT - 6}' y='{y + 3.5}' text-anchor='end'>{shown}</text>")
    bottom = _HEIGHT - _BOTTOM
    for value in frame.iterations.ticks:
        x = frame.x(value)
        parts.append(f"<line class='tick' x1='{x}' x2='{x}' y1='{bottom}' y2='{bottom + 4}'/>")
        parts.append(f"<text x='{x}' y='{bottom + 15}' text-anchor='middle'>{value:,.0f}</text>")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return "".join(parts) + f"<text x='{middle}' y='{_HEIGHT - 5}' text-anchor='middle'>iteration</text>"


def _hover(xs: Sequence[float], curves: Sequence[Curve], frame: _Frame) -> str:
    """For each iteration a strip that shows the values there while the pointer is on it."""
    values = [dict(curve.points) for curve in curves]
    places = [frame.x(x) for x in xs]
    edges = [_LEFT, *((left + right) / 2 for left, right in pairwise(places)), _WIDTH - _RIGHT]
    parts = []
    for x, place, (left, right) in zip(xs, places, pairwise(edges), strict=True):
        there = [(curve, found[x]) for curve, found in zip(curves, values, strict=True) if x in found]
        strip = f"<rect x='{left:.1f}' y='{_TOP}' width='{right - left:.1f}' height='{_HEIGHT - _TOP - _BOTTOM}'/>"
        guide = f"<line x1='{place}' x2='{place}' y1='{_TOP}' y2='{_HEIGHT - _BOTTOM}'/>"
        parts.append(f"<g class='at'>{strip}<g class='tip'>{guide}{_tip(x, place, there, frame.unit)}</g></g>")
    return "".join(parts)


def _tip(x: float, place: float, there: Sequence[tuple[Curve, float]], unit: str) -> str:
    shown = sorted(there, key=lambda entry: -entry[1])[:_MOST_TIP_LINES]
    lines = [(curve.slot, f"{curve.label}  {text(value, unit)}") for curve, value in shown]
    width = max(90.0, *(len(line) * _LETTER + 24 for _, line in lines))
    left = place + 8 if place + 8 + width < _WIDTH else max(2.0, place - 8 - width)
    rows = [f"<text x='{left + 7:.1f}' y='{_TOP + 12}'>iteration {x:,.0f}</text>"]
    for number, (slot, line) in enumerate(lines, start=1):
        y = _TOP + 12 + number * _TIP_LINE
        rows.append(
            f"<circle class='f{slot}' cx='{left + 10:.1f}' cy='{y - 3.3:.1f}' r='3'/>"
            f"<text x='{left + 17:.1f}' y='{y}'>{escape(line)}</text>"
        )
    height = 18 + len(lines) * _TIP_LINE
    return f"<rect class='box' x='{left:.1f}' y='{_TOP}' width='{width:.1f}' height='{height}' rx='4'/>{''.join(rows)}"


def _legend(curves: Sequence[Curve], panel: Panel) -> str:
    if len(curves) == 1 and len(panel.metrics) == 1 and "{" not in panel.metrics[0]:
        return ""  # the title says it
    names = "".join(f"<span><i class='b{curve.slot}'></i>{escape(curve.label)}</span>" for curve in curves)
    return f"<div class='legend'>{names}</div>"
