"""What compiled, as a table: one line for each worker, compiler and kernel, the longest first."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlpipe.jit_monitor.events import JitEvent

_HEADER = f"{'worker':12}{'compiler':18}{'compiled':>9}{'loaded':>8}{'seconds':>9}  kernel"


@dataclass
class _Line:
    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


def compile_table(events: Iterable[tuple[str, JitEvent]], most: int = 40) -> list[str]:
    """Lines for pairs of (worker, event); of the kernels beyond the `most` longest only the sum.

    A tuning run's candidates are loaded or compiled by Triton, and stand under `triton`; measuring them stands under
    `triton_autotune`.
    """
    lines: dict[tuple[str, str, str], _Line] = {}
    for worker, event in events:
        line = lines.setdefault((worker, event.kind, event.name), _Line())
        line.compiled += event.compiled
        line.loaded += not event.compiled
        line.seconds += event.seconds
    if not lines:
        return ["nothing compiled"]
    ranked = sorted(lines.items(), key=lambda item: -item[1].seconds)
    table = [_HEADER, *(_row(*key, line) for key, line in ranked[:most])]
    rest = ranked[most:]
    if rest:
        table.append(_row("", "", f"{len(rest)} more", _sum(line for _, line in rest)))
    return [*table, _row("", "", "in all", _sum(line for _, line in ranked))]


def _row(worker: str, kind: str, name: str, line: _Line) -> str:
    return f"{worker:12}{kind:18}{line.compiled:>9}{line.loaded:>8}{line.seconds:>9.1f}  {name}"


def _sum(lines: Iterable[_Line]) -> _Line:
    total = _Line()
    for line in lines:
        total.compiled += line.compiled
        total.loaded += line.loaded
        total.seconds += line.seconds
    return total
