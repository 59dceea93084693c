"""The page that sets runs side by side: figures, phases, settings that differ, and every metric with a line a run."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from rlpipe.monitoring.panels import GROUPS, Group, Panel, name_pattern
from rlpipe.monitoring.report.chart import Curve, chart
from rlpipe.monitoring.report.history import History, read_history
from rlpipe.monitoring.report.html import Raw, page, section, table
from rlpipe.monitoring.report.page import key_figures, taken_phases
from rlpipe.monitoring.report.series import LIGHT, label, phase_label, unit
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import DataError
from rlpipe.shared.phases import PHASES


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write the page of the runs in `folders` to `output`. Raises DataError where one of them holds nothing to show."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError("a run is given twice: name each run to compare once")
    runs = _with_names_of_their_own([read_history(folder) for folder in folders], folders)
    write_atomically(output, render_comparison(runs).encode("utf-8", errors="replace"))
    return output


def render_comparison(runs: Mapping[str, History]) -> str:
    """The whole page. `runs` by the name that is shown."""
    legend = " ".join(
        f"<span><i class='b{slot % len(LIGHT)}'></i>{escape(name)}</span>" for slot, name in enumerate(runs)
    )
    return page(
        " vs ".join(runs),
        [
            f"<div class='legend' style='font-size: 14px'>{legend}</div>",
            *(
                f"<p class='quiet'>{escape(name)}: {escape(note)}</p>"
                for name, run in runs.items()
                for note in run.notes
            ),
            section("Result", _figures(runs)),
            section("Seconds an iteration", _phases(runs)),
            section("Settings that differ", _settings(runs) or "<p class='quiet'>None.</p>"),
            *(_charts(runs, group) for group in GROUPS if group.in_report),
        ],
    )


def _with_names_of_their_own(runs: Sequence[History], folders: Sequence[Path]) -> dict[str, History]:
    """Runs of the same name in different folders are called by their folders, too."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{folder.resolve().parent.name}/{name}" for folder, name in zip(folders, names, strict=True)]
    if len(set(names)) < len(names):
        names = [str(folder.resolve()) for folder in folders]
    return dict(zip(names, runs, strict=True))


def _figures(runs: Mapping[str, History]) -> str:
    figures = [dict([("iterations", str(len(run.trained))), *key_figures(run)]) for run in runs.values()]
    names = dict.fromkeys(name for run in figures for name in run)
    return table(["", *_heads(runs)], [[name, *(run.get(name, "") for run in figures)] for name in names])


def _phases(runs: Mapping[str, History]) -> str:
    means = [
        {phase: seconds / len(run.trained) for phase, seconds in taken_phases(run).items()} for run in runs.values()
    ]
    phases = [phase for phase in (*PHASES, "unaccounted") if any(phase in mean for mean in means)]
    rows = [
        [phase_label(phase), *(f"{mean[phase]:.3f}" if phase in mean else "" for mean in means)] for phase in phases
    ]
    return table(["phase", *_heads(runs)], rows) if rows else ""


def _settings(runs: Mapping[str, History]) -> str:
    flat = [dict(_flat(_parsed(run.config_yaml))) for run in runs.values()]
    keys = sorted({key for settings in flat for key in settings})
    rows = [
        [key, *(str(settings.get(key, "")) for settings in flat)]
        for key in keys
        if len({str(settings.get(key, "")) for settings in flat}) > 1 and key != "run.name"
    ]
    return table(["setting", *_heads(runs)], rows, text_columns=range(1, len(runs) + 1)) if rows else ""


def _charts(runs: Mapping[str, History], group: Group) -> str:
    """A chart for each metric, since colours tell runs apart here."""
    logged = dict.fromkeys(name for run in runs.values() for name in run.names(""))
    metrics: dict[str, str] = {}
    for panel in group.panels:
        for pattern in map(re.compile, map(name_pattern, panel.metrics)):
            metrics.update({name: panel.title for name in logged if pattern.search(name) and name not in metrics})
    drawn = []
    for metric, title in metrics.items():
        slots = count()
        curves = [Curve.of(name, *run.series(metric), next(slots) % len(LIGHT)) for name, run in runs.items()]
        curves = [curve for curve in curves if curve.points]
        if any(y for curve in curves for _, y in curve.points):
            named = title if label(metric) in title.lower() else f"{title}: {label(metric)}"
            drawn.append(chart(Panel(named, (metric, "")), curves, unit(metric)))
    return section(group.title, f"<div class='charts'>{''.join(drawn)}</div>" if drawn else "")


def _heads(runs: Mapping[str, History]) -> list[Raw]:
    return [Raw(f"<i class='bar b{slot % len(LIGHT)}'></i>{escape(name)}") for slot, name in enumerate(runs)]


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # a file that someone changed by hand: the page shows what can be read
        return {"config.yaml": "cannot be read"}


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        value = {str(place): entry for place, entry in enumerate(value)}
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]
