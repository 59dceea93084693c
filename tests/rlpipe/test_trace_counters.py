"""How full engines were, in the trace."""

import asyncio
import json
from types import SimpleNamespace

from rlpipe.shared.phases import Counter, Span
from rlpipe.training.trace import write_trace
from rollout.engine_counters import EngineCounters


def test_counters_are_curves_of_their_worker(tmp_path):
    path = tmp_path / "trace.json"
    spans = {"driver": [Span("rollout", 100.0, 2.0)], "engine-0": [Span("generate", 100.5, 1.0)]}
    seen = [Counter("requests", second, {"running": 2.0, "queued": 1.0}) for second in (99.0, 100.75)]
    write_trace(path, spans, {"engine-0": seen})
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "C"]
    assert events == [
        {"name": "requests", "ph": "C", "pid": 1, "ts": 0.75e6, "args": {"running": 2.0, "queued": 1.0}},
    ]


def test_an_engine_is_looked_at_only_while_a_trace_is_wanted():
    looks = 0

    async def loads() -> list[SimpleNamespace]:
        nonlocal looks
        looks += 1
        return [SimpleNamespace(num_running_reqs=3, num_waiting_reqs=2, token_usage=0.5)]

    async def traced() -> tuple[tuple[Counter, ...], ...]:
        counters = EngineCounters(loads)
        before = counters.take(keep=True)
        while looks < 2:
            await asyncio.sleep(0.01)
        found = counters.take(keep=False)
        return before, found, counters.take(keep=False)

    before, found, after = asyncio.run(traced())
    assert before == after == ()
    assert {one.name: dict(one.values) for one in found} == {
        "requests": {"running": 3.0, "queued": 2.0},
        "KV pool": {"used share": 0.5},
    }


def test_an_engine_is_looked_at_by_one_over_iterations_that_are_traced_one_after_another():
    looks = 0

    async def loads() -> list[SimpleNamespace]:
        nonlocal looks
        looks += 1
        return []

    async def traced() -> int:
        counters = EngineCounters(loads)
        for _ in range(3):
            counters.take(keep=True)
            await asyncio.sleep(0.01)
        return looks

    assert asyncio.run(traced()) == 1
