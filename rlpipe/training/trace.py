"""The timeline of one iteration, all roles together, for https://ui.perfetto.dev or chrome://tracing.

The format is the Trace Event Format of Chrome: complete events ("ph": "X") and counters ("ph": "C"), one process for
each worker.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.shared.phases import Counter, Span

_MICROSECONDS = 1e6


def write_trace(
    path: Path,
    spans_by_worker: Mapping[str, Sequence[Span]],
    counters_by_worker: Mapping[str, Sequence[Counter]] | None = None,
) -> None:
    """`spans_by_worker` in the order in which the workers are to be shown; times begin with the earliest span. Counters
    are curves below the spans of their worker.

    Wall clocks of different hosts differ by what their synchronisation leaves, typically below a millisecond.
    """
    starts = [span.start_seconds for spans in spans_by_worker.values() for span in spans]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for number, (worker, spans) in enumerate(spans_by_worker.items()):
        events.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": worker}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
        events += [_event(number, span, origin) for span in spans]
        counters = (counters_by_worker or {}).get(worker, ())
        events += [_counter_event(number, one, origin) for one in counters if one.seconds >= origin]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _event(worker: int, span: Span, origin: float) -> dict[str, Any]:
    return {
        "name": span.name,
        "ph": "X",
        "pid": worker,
        "tid": 0,
        "ts": round((span.start_seconds - origin) * _MICROSECONDS, 3),
        "dur": round(span.seconds * _MICROSECONDS, 3),
    }


def _counter_event(worker: int, counter: Counter, origin: float) -> dict[str, Any]:
    moment = round((counter.seconds - origin) * _MICROSECONDS, 3)
    return {"name": counter.name, "ph": "C", "pid": worker, "ts": moment, "args": dict(counter.values)}
