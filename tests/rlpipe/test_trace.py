"""The trace file: Chrome's format, one process a worker, times from the earliest span on."""

import json

from rlpipe.shared.phases import PhaseClock, Span
from rlpipe.training.trace import write_trace


def test_a_trace_has_a_process_for_each_worker_and_times_from_the_first_span(tmp_path):
    path = tmp_path / "traces" / "iteration_000003.json"
    spans = {
        "driver": [Span("rollout", 100.0, 2.0), Span("train", 102.0, 1.0)],
        "actor-0": [Span("forward", 102.25, 0.5)],
    }
    write_trace(path, spans)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "driver", 1: "actor-0"}
    complete = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert complete == [("rollout", 0, 0.0, 2e6), ("train", 0, 2e6, 1e6), ("forward", 1, 2.25e6, 0.5e6)]


def test_phases_leave_spans_in_wall_clock_time():
    clock = PhaseClock()
    with clock.phase("rollout"):
        pass
    with clock.phase("train"):
        pass
    assert [span.name for span in clock.spans] == ["rollout", "train"]
    first, second = clock.spans
    assert first.start_seconds + first.seconds <= second.start_seconds + 1e-3
    assert first.seconds == clock.seconds["rollout"]
