"""What `rlpipe plan` says now of the runs whose measured seconds are recorded."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from rlpipe.commands.cards.record_file import read_record
from rlpipe.commands.clusters import load_cluster

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PHASES = {
    "step s": "step",
    "rollout s": "rollout",
    "forward s": "forward_backward",
    "backward s": "forward_backward",
    "exchange s": "forward_backward",
}
TITLE = re.compile(
    r"^(?P<tokens>[\d,]+) tokens, (?:(?:full|lora (?P<rank>\d+)), )?guard (?P<guard>\w+), gdn (?P<gdn>\w+), .*"
)


def _measured(output: str) -> dict[tuple, dict[str, float]]:
    """Seconds of the last iteration, when nothing is compiled any more, by what makes a run a case."""
    runs: dict[tuple, dict[str, float]] = {}
    for line in output.splitlines():
        if found := TITLE.match(line):
            length = int(found["tokens"].replace(",", ""))
            case = (length, found["guard"], found["gdn"], int(found["rank"] or 0))
            runs[case] = {}
        for name, phase in PHASES.items():
            if runs and line.startswith(f"{name}  "):
                runs[case][phase] = runs[case].get(phase, 0.0) + float(line.split()[-1].replace(",", ""))
    return runs


WHOLE = {"step", "rollout", "forward_backward"}


# The host of the two GPUs was busy with other programs, too: what waits for processors is not compared there.
@pytest.mark.parametrize(
    ("record", "cluster", "compared"),
    [
        ("whole_step.cuda", "local_1x141gb", WHOLE),
        ("whole_step_lora.cuda", "local_1x141gb", WHOLE),
        ("whole_step_8b.cuda", "local_1x141gb", WHOLE),
        ("whole_step_table.cuda2", "local_2x141gb", {"forward_backward"}),
    ],
)
def test_seconds_are_planned_within_a_fifth(record, cluster, compared, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import whole_step
    from whole_step_setup import Case, Setup

    recorded = read_record(BENCHMARKS / "results" / f"{record}.json")
    monkeypatch.setattr(sys, "argv", shlex.split(recorded.command)[1:])
    monkeypatch.setattr(whole_step, "present_cluster", lambda: load_cluster(cluster))
    options = whole_step.arguments()
    setup = Setup(options, tmp_path, options.here)
    runs = _measured(recorded.output)
    assert runs
    shape = setup.shape(setup.layers([Case(*parts) for parts in runs]))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text(json.dumps(shape))
    for parts, measured in runs.items():
        assert measured.keys() == WHOLE
        plan = setup.plan(setup.write_configuration(Case(*parts), str(tmp_path / "policy")))
        planned = {**plan.seconds, "step": plan.step_seconds}
        ratios = {phase: planned[phase] / seconds for phase, seconds in measured.items() if phase in compared}
        print(parts, {phase: f"{ratio:.2f}" for phase, ratio in ratios.items()})
        assert all(0.8 <= ratio <= 1.2 for ratio in ratios.values()), (parts, ratios, measured)
