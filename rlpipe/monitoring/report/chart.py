"""Small line and stacked-area charts as SVG text, for a page that needs no network and no script."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlpipe.monitoring.panels import Panel

COLORS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#ee8866",
    "#44bb99",
    "#bbcc33",
    "#999933",
    "#882255",
    "#332288",
    "#117733",
    "#88ccee",
    "#cc6677",
    "#555555",
    "#222222",
)  # fmt: skip
_WIDTH, _HEIGHT = 380, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 22
_STEPS = 4

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """One metric over the iterations where it was logged; points that are not finite are left out."""

    label: str
    points: tuple[Point, ...]

    @classmethod
    def of(cls, label: str, iterations: Sequence[int], values: Sequence[float]) -> "Curve":
        pairs = zip(iterations, values, strict=True)
        return cls(label, tuple((float(x), float(y)) for x, y in pairs if math.isfinite(y)))


def chart(panel: Panel, curves: Sequence[Curve]) -> str:
    """A figure element with title, drawing and legend. `curves` has at least one point."""
    stacked = panel.kind == "stacked"
    levels = _stacked(curves) if stacked else [curve.points for curve in curves]
    scale = _Scale.over([point for level in levels for point in level], from_zero=stacked)
    marks = []
    for index, (curve, level) in enumerate(zip(curves, levels, strict=True)):
        below = (levels[index - 1] if index else [(x, 0.0) for x, _ in level]) if stacked else None
        marks.append(_mark(curve, level, below, COLORS[index % len(COLORS)], scale))
    legend = " ".join(
        f"<span><i style='background:{COLORS[index % len(COLORS)]}'></i>{escape(curve.label)}</span>"
        for index, curve in enumerate(curves)
    )
    return (
        f"<figure><figcaption>{escape(panel.title)}</figcaption>"
        f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(panel.title, quote=True)}'>"
        f"{_axes(scale)}{''.join(marks)}</svg><div class='legend'>{legend}</div></figure>"
    )


@dataclass(frozen=True)
class _Scale:
    low_x: float
    high_x: float
    low_y: float
    high_y: float

    @classmethod
    def over(cls, points: Sequence[Point], from_zero: bool) -> "_Scale":
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = (0.0 if from_zero else min(ys)), max(ys)
        # Near zero a curve of counts or shares starts there; far from it the change is what matters.
        low = 0.0 if 0 < low < 0.5 * high else low
        room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        return cls(min(xs), max(xs), low if low == 0 else low - room, high + room)

    def x(self, value: float) -> float:
        share = (value - self.low_x) / (self.high_x - self.low_x) if self.high_x > self.low_x else 0.5
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.low_y) / (self.high_y - self.low_y)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


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


def _mark(curve: Curve, level: Sequence[Point], below: Sequence[Point] | None, color: str, scale: _Scale) -> str:
    def path(points: Sequence[Point]) -> str:
        return " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in points)

    title = f"<title>{escape(curve.label)}</title>"
    if below is not None and len(level) > 1:
        outline = path([*level, *reversed(below)])
        return f"<polygon points='{outline}' fill='{color}' fill-opacity='.85'>{title}</polygon>"
    dots = "".join(f"<circle cx='{scale.x(x)}' cy='{scale.y(y)}' r='1.8' fill='{color}'/>" for x, y in level)
    return f"<g>{title}<polyline points='{path(level)}' fill='none' stroke='{color}' stroke-width='1.5'/>{dots}</g>"


def _axes(scale: _Scale) -> str:
    parts = []
    for step in range(_STEPS + 1):
        value = scale.low_y + (scale.high_y - scale.low_y) * step / _STEPS
        y = scale.y(value)
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y}' y2='{y}' stroke='#e4e6ea'/>")
        parts.append(f"<text x='{_LEFT - 5}' y='{y + 3.5}' text-anchor='end'>{value:.3g}</text>")
    ends = dict.fromkeys((scale.low_x, scale.high_x))
    for end in ends:
        parts.append(f"<text x='{scale.x(end)}' y='{_HEIGHT - 6}' text-anchor='middle'>{end:.0f}</text>")
    return "".join(parts)
