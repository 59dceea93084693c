"""The panels as a workspace of Weights & Biases."""

import json
from typing import Any

from rlpipe.monitoring.panels import GROUPS, Panel, name_pattern
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "wandb_workspaces.workspaces.interface:Workspace._to_model",
    why="a workspace is told apart from one that is there by its content",
    drop_when="wandb-workspaces can update by name",
)

_NAME = "rlpipe: phases and speed"
_WIDTH, _HEIGHT, _COLUMNS = 8, 6, 3


def workspace(entity: str, project: str) -> Any:
    """A `wandb_workspaces` workspace with a section for each group. ConfigError if the package is missing."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'rlpipe[wandb]'") from None

    def line_plot(position: int, panel: Panel) -> Any:
        row, column = divmod(position, _COLUMNS)
        open_names = [metric for metric in panel.metrics if "{" in metric]
        # A plot takes either names or one expression.
        names = {"metric_regex": "|".join(map(name_pattern, panel.metrics))} if open_names else {"y": [*panel.metrics]}
        return reports.LinePlot(
            title=panel.title,
            x="Step",
            plot_type="stacked-area" if panel.kind == "stacked" else "line",
            layout=reports.Layout(x=_WIDTH * column, y=_HEIGHT * row, w=_WIDTH, h=_HEIGHT),
            **names,
        )

    sections = [
        workspaces.Section(
            name=group.title,
            is_open=True,
            panels=[line_plot(position, panel) for position, panel in enumerate(group.panels)],
        )
        for group in GROUPS
    ]
    return workspaces.Workspace(entity=entity, project=project, name=_NAME, sections=sections)


def as_json(view: Any) -> str:
    """What would be sent."""
    return json.dumps(json.loads(view._to_model().model_dump_json(by_alias=True, exclude_none=True)), indent=2)


def create(view: Any) -> str:
    """Save the workspace; returns its address. ConfigError where Weights & Biases refuses it."""
    import wandb

    try:
        return str(view.save().url)
    except (wandb.Error, OSError, ValueError) as error:
        raise ConfigError(
            f"the workspace could not be saved in {view.entity}/{view.project}: {error}; set WANDB_API_KEY in the "
            "environment and give --entity, or look at it with --dry-run"
        ) from None
