"""The HTML page: one file, no network, no script; figures inside as SVG."""

import re
from collections import Counter
from html import escape
from typing import Any

from rlpipe.monitoring.metric_dictionary import METRICS
from rlpipe.monitoring.panels import GROUPS, Panel, name_pattern
from rlpipe.monitoring.report.advice import advice
from rlpipe.monitoring.report.chart import Curve, chart
from rlpipe.monitoring.report.history import History
from rlpipe.monitoring.report.table import performance_rows, table_headers
from rlpipe.shared.phases import PHASES

_MOST_KERNELS = 20

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1250px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 0.5em 0 1.5em } th, td { padding: 0.25em 0.7em; text-align: right }
th { background: #f0f2f5 }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #fafbfc }
pre { background: #f6f7f9; padding: 1em; overflow-x: auto }
.scroll { overflow-x: auto } svg { width: 100%; height: auto }
h2 { margin-top: 1.8em } ul { padding-left: 1.2em }
.charts { display: grid; grid-template-columns: repeat(3, 1fr); gap: 1em }
figure { margin: 0; border: 1px solid #e4e6ea; border-radius: 6px; padding: 0.6em } figcaption { font-weight: 600 }
.legend { font-size: 11px; color: #555 } .legend span { margin-right: 0.8em; white-space: nowrap }
.legend i { display: inline-block; width: 9px; height: 9px; margin-right: 4px; border-radius: 2px }
figure text { font: 10px system-ui, sans-serif; fill: #666 }
.left td { text-align: left; vertical-align: top; white-space: pre-wrap }
"""
_TABLE_METRICS = (
    "rollout/reward_mean",
    "rollout/accuracy",
    "rollout/response_tokens_mean",
    "train/loss",
    "train/gradient_norm",
    "mismatch/logprob_abs_max",
    "time/rollout_seconds",
    "time/forward_seconds",
    "time/backward_seconds",
    "time/optimizer_seconds",
    "time/exchange_seconds",
    "time/weight_sync_seconds",
    "time/step_seconds",
    "time/unaccounted_share",
    "perf/rollout_tokens_per_second",
    "perf/actor_tokens_per_second",
)
_SAMPLE_COLUMNS = ("iteration", "prompt", "response", "label", "reward", "reason")


def render(history: History, svg: str) -> str:
    """The whole page. `svg`: the figure."""
    title = escape(history.name)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        _summary(history),
        "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in advice(history)) + "</ul>",
        svg[svg.index("<svg") :],
        *_charts(history),
        "<h2>Seconds of each phase</h2>",
        _phase_table(history),
        "<h2>Speed</h2>",
        _speed_table(history),
        "<h2>Ranks, last iteration</h2>",
        _rank_table(history),
        "<h2>Compilation</h2>",
        _compilation_table(history),
        "<h2>Iterations</h2>",
        _iteration_table(history),
        "<h2>Samples</h2>",
        _sample_table(history),
        "<h2>Configuration</h2>",
        f"<details><summary>resolved configuration</summary><pre>{escape(history.config_yaml)}</pre></details>",
        "</html>",
    ]
    return "\n".join(parts)


def _summary(history: History) -> str:
    sentences = [f"{len(history.trained)} iterations."]
    for name in history.names("eval/", "/accuracy"):
        _, values = history.series(name)
        sentences.append(f"Held-out accuracy ({escape(name.split('/')[1])}): {values[0]:.1%} → {values[-1]:.1%}.")
    sentences += [escape(note) for note in history.notes]
    return f"<p>{' '.join(sentences)}</p>"


def _charts(history: History) -> list[str]:
    """A heading and its charts for each group of the dashboard that has anything to show."""
    parts = []
    for group in GROUPS:
        drawn = [chart(panel, curves) for panel in group.panels if (curves := _curves(history, panel))]
        if drawn:
            parts += [f"<h2>{escape(group.title)}</h2>", f"<div class='charts'>{''.join(drawn)}</div>"]
    return parts


def _curves(history: History, panel: Panel) -> list[Curve]:
    patterns = [re.compile(name_pattern(metric)) for metric in panel.metrics]
    logged = history.names("")
    names = [name for pattern in patterns for name in logged if pattern.search(name)]
    curves = [Curve.of(name, *history.series(name)) for name in names]
    return [curve for curve in curves if curve.points and (panel.kind == "lines" or any(y for _, y in curve.points))]


def _phase_seconds(history: History) -> dict[str, float]:
    """Of all iterations together, phases that took any; a row without times counts as none."""
    seconds = {
        phase: sum(row.get(f"time/{phase}_seconds", 0.0) for row in history.trained)
        for phase in (*PHASES, "unaccounted")
    }
    return {phase: value for phase, value in seconds.items() if value}


def _phase_table(history: History) -> str:
    count = max(1, len(history.trained))
    whole = sum(row.get("time/step_seconds", 0.0) for row in history.trained)
    rows = []
    for phase, seconds in _phase_seconds(history).items():
        share = f"{seconds / whole:.1%}" if whole else ""
        meaning = METRICS[f"time/{phase}_seconds"].meaning
        rows.append([phase, f"{seconds:.2f}", f"{seconds / count:.3f}", share, meaning])
    return _table(["phase", "seconds in all", "seconds an iteration", "share", "what it is"], rows)


def _speed_table(history: History) -> str:
    skip = 1 if any(row["iteration"] > 1 for row in history.trained) else 0
    if not any(row["iteration"] > skip for row in history.trained):
        return ""
    rows = [
        [label, *("" if value is None else _number(value) for value in row.values())]
        for label, row in performance_rows(history, skip)
    ]
    return f"<div class='scroll'>{_table(['iteration', *table_headers()], rows)}</div>"


def _rank_table(history: History) -> str:
    if not history.ranks:
        return "<p>No times of single ranks.</p>"
    last = [row for row in history.ranks if row["iteration"] == history.ranks[-1]["iteration"]]
    parts = sorted({part for row in last for part in row["seconds"]})
    rows = [[row["name"], row["host"], *(_number(row["seconds"].get(part)) for part in parts)] for row in last]
    return f"<div class='scroll'>{_table(['rank', 'host', *(f'{part} s' for part in parts)], rows)}</div>"


def _compilation_table(history: History) -> str:
    """The kernels that took longest, all workers and iterations together."""
    seconds: Counter[tuple[str, str]] = Counter()
    compiled: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], int] = {}
    for event in history.jit_events:
        if "seconds" in event:
            kernel = event["kind"], event["name"]
            seconds[kernel] += event["seconds"]
            compiled[kernel] += bool(event["compiled"])
            last[kernel] = event["iteration"]
    if not seconds:
        return "<p>Nothing was compiled.</p>"
    rows: list[list[Any]] = [
        [name, kind, compiled[kind, name], f"{total:.2f}", last[kind, name]]
        for (kind, name), total in seconds.most_common(_MOST_KERNELS)
    ]
    header = ["kernel or communicator", "compiler", "compiled", "seconds, all workers", "last seen in iteration"]
    return f"<div class='left scroll'>{_table(header, rows)}</div>"


def _iteration_table(history: History) -> str:
    names = [name for name in _TABLE_METRICS if any(name in row for row in history.rows)]
    names += history.names("eval/", "/accuracy")
    rows = [[row["iteration"], *(_number(row.get(name)) for name in names)] for row in history.rows]
    return f"<div class='scroll'>{_table(['iteration', *names], rows)}</div>"


def _sample_table(history: History) -> str:
    shown = [*history.samples[:4], *history.samples[-8:]] if len(history.samples) > 12 else history.samples
    rows = [[sample.get(column, "") for column in _SAMPLE_COLUMNS] for sample in shown]
    return f"<div class='left scroll'>{_table(_SAMPLE_COLUMNS, rows)}</div>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _table(header: Any, rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
