"""The HTML page: one file, no network, the figure inside as SVG."""

from html import escape
from typing import Any

from rlpipe.iteration import PHASES
from rlpipe.metrics import METRICS
from rlpipe.report.history import History

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1250px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 0.5em 0 1.5em } th, td { padding: 0.25em 0.7em; text-align: right }
th { background: #f0f2f5 }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #fafbfc }
pre { background: #f6f7f9; padding: 1em; overflow-x: auto }
.scroll { overflow-x: auto } svg { width: 100%; height: auto }
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
    "perf/trained_tokens_per_second",
)
_SAMPLE_COLUMNS = ("iteration", "prompt", "response", "label", "reward", "reason")


def render(history: History, svg: str) -> str:
    """The whole page. `svg`: the figure."""
    title = escape(history.name)
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        _summary(history),
        svg[svg.index("<svg") :],
        "<h2>Where the time went</h2>",
        _phase_table(history),
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
    shares = _phase_shares(history)
    if shares:
        largest = max(shares, key=lambda phase: shares[phase])
        sentences.append(f"{largest} takes {shares[largest]:.0%} of an iteration.")
    return f"<p>{' '.join(sentences)}</p>"


def _phase_shares(history: History) -> dict[str, float]:
    whole = sum(row["time/step_seconds"] for row in history.trained)
    seconds = {
        phase: sum(row[f"time/{phase}_seconds"] for row in history.trained) for phase in (*PHASES, "unaccounted")
    }
    return {phase: value / whole for phase, value in seconds.items() if value}


def _phase_table(history: History) -> str:
    count = max(1, len(history.trained))
    rows = []
    for phase, share in _phase_shares(history).items():
        name = f"time/{phase}_seconds"
        seconds = sum(row[name] for row in history.trained)
        rows.append([phase, f"{seconds:.2f}", f"{seconds / count:.3f}", f"{share:.1%}", METRICS[name].meaning])
    return _table(["phase", "seconds in all", "seconds an iteration", "share", "what it is"], rows)


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
