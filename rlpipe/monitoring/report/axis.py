"""Axes with round ticks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_TICKS = 5
_LEAST = 1e-290  # what is smaller has no steps that floating point can tell apart


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with `ticks` in between that are multiples of 1, 2 or 5 times a power of ten."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        return (value - self.low) / (self.high - self.low)


def value_axis(values: Sequence[float], from_zero: bool, unit: str) -> Axis:
    """Begins and ends with a tick. Near zero it starts there; far from it the change is what matters."""
    low, high = (0.0 if abs(end) < _LEAST else end for end in (min(values), max(values)))
    if from_zero or 0 < low < 0.5 * high:
        low = min(0.0, low)
    if unit == "share" and 0.6 < high <= 1 and low >= 0:
        low, high = (0.0 if low < 0.7 else low), 1.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (0.0, 1.0) if high == 0 else (low - abs(low) * 0.5, high + abs(high) * 0.5)
    binary = 2.0**30 if unit == "bytes" else 1.0
    step = _round_step((high - low) / binary / (_MOST_TICKS - 1)) * binary
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def iteration_axis(low: float, high: float) -> Axis:
    """Exactly as long as the data; ticks are whole numbers."""
    if high <= low:
        return Axis(low - 0.5, low + 0.5, (float(round(low)),))
    step = max(1.0, _round_step((high - low) / _MOST_TICKS))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(number * step for number in range(first, last + 1)))


def tick_text(value: float, axis: Axis, unit: str) -> str:
    """As many digits as tell the ticks apart."""
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 1.0
    if unit == "share":
        return f"{value * 100:.{_decimals(step * 100)}f}%" if step >= 1e-6 else f"{value:.0e}"
    if unit == "bytes":
        return f"{value / 2**30:.{_decimals(step / 2**30)}f}"
    largest = max(abs(tick) for tick in axis.ticks)
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if largest >= size:
            divisor = 1e3 if letter == "k" else size
            return f"{value / divisor:.{_decimals(step / divisor)}f}{letter}" if value else "0"
    if largest < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-") if value else "0"
    return f"{value:,.{_decimals(step)}f}"


def _decimals(step: float) -> int:
    return max(0, min(6, -math.floor(math.log10(step) + 1e-9)))


def _round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
