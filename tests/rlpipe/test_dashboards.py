"""Dashboards show metrics that exist, and only those."""

import json
import re

import pytest
from typer.testing import CliRunner

from rlpipe.cli import app
from rlpipe.monitoring.metric_dictionary import METRICS
from rlpipe.monitoring.panels import GROUPS, name_pattern
from rlpipe.monitoring.tensorboard import custom_scalars
from rlpipe.shared.phases import PHASES

PANELS = [panel for group in GROUPS for panel in group.panels]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_s_metrics_are_in_the_dictionary(panel):
    assert panel.metrics
    assert [metric for metric in panel.metrics if metric not in METRICS] == []


def test_titles_are_unique_and_the_phase_stack_has_every_phase():
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    (stack,) = [panel for panel in PANELS if panel.kind == "stacked"]
    assert {f"time/{phase}_seconds" for phase in PHASES} < set(stack.metrics)


def test_a_pattern_matches_the_names_of_its_metric_alone():
    pattern = name_pattern("eval/{dataset}/accuracy")
    assert re.search(pattern, "eval/gsm8k/accuracy")
    assert not re.search(pattern, "eval/gsm8k/accuracy_low")
    assert not re.search(name_pattern("train/loss"), "train/policy_loss")


def test_the_workspace_is_printed_without_a_network_or_a_key(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    pytest.importorskip("wandb_workspaces")
    result = CliRunner().invoke(app, ["dashboard", "wandb", "--dry-run", "--project", "p", "--entity", "e"])
    assert result.exit_code == 0, result.output
    sent = json.loads(result.output)
    sections = sent["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections if section["panels"]] == [group.title for group in GROUPS]
    text = json.dumps(sent)
    for panel in PANELS:
        assert panel.title in text
        for metric in panel.metrics:
            assert (metric if "{" not in metric else "[^/]+") in text


def test_tensorboard_gets_the_layout_with_the_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    from rlpipe.monitoring.run_directory import RunDirectory
    from rlpipe.monitoring.tensorboard import TensorBoard

    tracker = TensorBoard(RunDirectory(tmp_path), 1)
    tracker.log(1, {"train/loss": 0.5})
    tracker.close(failed=False)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    stored = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(stored)
    assert [category.title for category in layout.category] == list(custom_scalars())
    assert sum(len(category.chart) for category in layout.category) == len(PANELS)
