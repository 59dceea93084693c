"""The table of what compiled."""

from rlpipe.jit_monitor import JitEvent
from rlpipe.jit_monitor.compile_table import compile_table


def _event(name: str, seconds: float, compiled: bool) -> JitEvent:
    return JitEvent("triton", name, "", seconds, compiled, "", "rollout", 1)


def test_kernels_are_added_up_by_worker_and_ranked_by_seconds():
    events = [
        ("actor-0", _event("norm", 0.5, compiled=True)),
        ("engine-0", _event("norm", 3.0, compiled=True)),
        ("actor-0", _event("norm", 0.75, compiled=False)),
        ("actor-0", _event("convolution", 2.0, compiled=True)),
    ]
    rows = [line.split() for line in compile_table(events)[1:]]
    assert rows == [
        ["engine-0", "triton", "1", "0", "3.0", "norm"],
        ["actor-0", "triton", "1", "0", "2.0", "convolution"],
        ["actor-0", "triton", "1", "1", "1.2", "norm"],
        ["3", "1", "6.2", "in", "all"],
    ]


def test_a_long_table_ends_with_the_sum_of_the_rest():
    events = [("actor-0", _event(f"kernel{number}", number, compiled=True)) for number in range(6)]
    rows = [line.split() for line in compile_table(events, most=2)[1:]]
    assert [row[-1] for row in rows[:2]] == ["kernel5", "kernel4"]
    assert rows[2:] == [["4", "0", "6.0", "4", "more"], ["6", "0", "15.0", "in", "all"]]


def test_nothing_is_said_to_be_nothing():
    assert compile_table([]) == ["nothing compiled"]
