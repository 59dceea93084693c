"""The page of one run: what came of it, what to change, charts, tables, samples."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from rlpipe.monitoring.durations import duration_text
from rlpipe.monitoring.metric_dictionary import METRICS
from rlpipe.monitoring.panels import GROUPS, Group, Panel, name_pattern
from rlpipe.monitoring.report.advice import advice
from rlpipe.monitoring.report.chart import Curve, Point, chart
from rlpipe.monitoring.report.episodes import episode_articles
from rlpipe.monitoring.report.history import History
from rlpipe.monitoring.report.html import Raw, cards, number, page, section, table
from rlpipe.monitoring.report.series import held_out, label, phase_label, slot, text, unit
from rlpipe.monitoring.report.table import performance_rows, table_headers
from rlpipe.monitoring.report.tail import tail_advice, tail_table
from rlpipe.shared.phases import PHASES

_MOST_KERNELS = 20
_LEAST_PHASE_SHARE = 5e-4  # below it stands what asking whether a pass is needed takes
_MOST_ROWS = 400
_LAST_ROWS = 20

_TABLE_METRICS = (
    "rollout/reward_mean",
    "rollout/accuracy",
    "rollout/response_tokens_mean",
    "train/loss",
    "train/gradient_norm",
    "train/entropy",
    "mismatch/logprob_abs_max",
    *(f"time/{phase}_seconds" for phase in PHASES),
    "time/step_seconds",
    "time/unaccounted_share",
    "perf/rollout_tokens_per_second",
    "perf/actor_tokens_per_second",
)


def render(history: History) -> str:
    """The whole page."""
    return page(
        history.name,
        [
            f"<p class='lead'>{escape(' '.join(_lead(history)))}</p>",
            cards(key_figures(history)),
            _advice(history),
            *(_charts(history, group) for group in GROUPS if group.in_report),
            section("Seconds of each phase", _phase_table(history)),
            section("Speed", _speed_table(history)),
            section("The tail", tail_table(history)),
            section("Ranks, last iteration", _rank_table(history)),
            section("Compilation", _compilation_table(history)),
            section("Samples", _samples(history)),
            section("Episodes, turn by turn", episode_articles(history.episodes)),
            section("Iterations", _iteration_table(history)),
            section(
                "Configuration",
                f"<details><summary>Show all settings</summary><pre>{escape(history.config_yaml)}</pre></details>",
            ),
        ],
    )


def key_figures(history: History) -> list[tuple[str, str]]:
    """What came of the run: (what it is, value)."""
    facts = []
    for name in held_out(history.names("eval/")):
        facts.append((label(name), _first_and_last(history, name)))
    for name in ("rollout/reward_mean", "rollout/response_tokens_mean", "train/entropy"):
        _, values = history.series(name)
        if values:
            facts.append((label(name), f"{values[0]:.3g} → {values[-1]:.3g}"))
    warm = [row for row in history.trained if row["iteration"] > 1] or list(history.trained)
    for name in ("time/step_seconds", "perf/rollout_tokens_per_second", "perf/actor_tokens_per_second"):
        values = sorted(row[name] for row in warm if name in row)
        if values:
            facts.append((f"{label(name)}, median", text(values[len(values) // 2], unit(name))))
    return facts


def _first_and_last(history: History, name: str) -> str:
    _, values = history.series(name)
    return " → ".join(text(value, unit(name)) for value in dict.fromkeys((values[0], values[-1])))


def taken_phases(history: History) -> dict[str, float]:
    """Seconds of all iterations together, of each phase that was gone through."""
    whole = sum(row.get("time/step_seconds", 0.0) for row in history.trained)
    seconds = {
        phase: sum(row.get(f"time/{phase}_seconds", 0.0) for row in history.trained)
        for phase in (*PHASES, "unaccounted")
    }
    return {phase: value for phase, value in seconds.items() if value > _LEAST_PHASE_SHARE * whole}


def _lead(history: History) -> list[str]:
    whole = sum(row.get("time/step_seconds", 0.0) for row in history.rows)
    count = len(history.trained)
    sentences = [f"{count} iteration{'' if count == 1 else 's'}{f' in {duration_text(whole)}' if whole else ''}."]
    for name in held_out(history.names("eval/")):
        _, data, what = name.split("/")
        sentences.append(f"Held-out {what.removesuffix('_mean')} ({data}): {_first_and_last(history, name)}.")
    phases = taken_phases(history)
    if phases:
        largest = max(phases, key=lambda phase: phases[phase])
        share = phases[largest] / max(1e-9, sum(phases.values()))
        sentences.append(f"Most time went into {phase_label(largest)} ({share:.0%}).")
    return [*sentences, *history.notes]


def _advice(history: History) -> str:
    sentences = [*advice(history), *tail_advice(history)]
    if not sentences:
        return "<p class='quiet'>Nothing in these numbers asks for a change.</p>"
    return "<ul class='advice'>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _charts(history: History, group: Group) -> str:
    """The group's charts of what happened; what stayed at zero is a sentence."""
    ranks = {row["name"] for row in history.ranks}
    if group.title == "Ranks" and len(ranks) == 1:
        return ""
    drawn, zero, same = [], [], []
    shown: set[tuple[Point, ...]] = set()
    for panel in group.panels:
        curves = _curves(history, panel)
        points = {curve.points for curve in curves.values()}
        if points and points <= shown:
            same.append(panel.title)
        elif any(y for curve in curves.values() for _, y in curve.points):
            shown |= points
            drawn.append(chart(panel, list(curves.values()), unit(next(iter(curves)))))
        elif curves:
            zero.append(panel.title)
    body = f"<div class='charts'>{''.join(drawn)}</div>" if drawn else ""
    for reason, titles in (("Zero throughout", zero), ("The same values as above", same)):
        body += f"<p class='quiet'>{reason}: {escape(', '.join(titles))}.</p>" if titles else ""
    return section(group.title, body)


def _curves(history: History, panel: Panel) -> dict[str, Curve]:
    """By metric. Of a stack only what has a share in it."""
    logged = history.names("")
    patterns = [re.compile(name_pattern(metric)) for metric in panel.metrics]
    names = dict.fromkeys(name for pattern in patterns for name in logged if pattern.search(name))
    curves = {name: Curve.of(label(name), *history.series(name), slot(name)) for name in names}
    curves = {name: curve for name, curve in curves.items() if curve.points}
    if panel.kind == "lines":
        return _merged(curves)
    sums = {name: sum(y for _, y in curve.points) for name, curve in curves.items()}
    whole = sum(sums.values())
    return {name: curve for name, curve in curves.items() if sums[name] > _LEAST_PHASE_SHARE * whole}


def _merged(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Curves that lie on each other as one, with the names of all."""
    merged: dict[tuple[Point, ...], tuple[str, Curve]] = {}
    for name, curve in curves.items():
        first, drawn = merged.get(curve.points, (name, None))
        merged[curve.points] = first, curve if drawn is None else replace(drawn, label=f"{drawn.label} = {curve.label}")
    return dict(merged.values())


def _phase_table(history: History) -> str:
    count = max(1, len(history.trained))
    whole = sum(row.get("time/step_seconds", 0.0) for row in history.trained)
    rows = []
    for phase, seconds in taken_phases(history).items():
        metric = f"time/{phase}_seconds"
        name = Raw(f"<i class='bar b{slot(metric)}'></i>{escape(phase_label(phase))}")
        share = f"{seconds / whole:.1%}" if whole else ""
        rows.append([name, share, f"{seconds / count:.3f}", f"{seconds:.2f}", METRICS[metric].meaning])
    rest = whole - sum(taken_phases(history).values())
    if rows and whole and rest > 0:
        rows.append(
            ["the rest", f"{rest / whole:.1%}", f"{rest / count:.3f}", f"{rest:.2f}", "phases of less than 0.05%"]
        )
    header = ["phase", "share", "seconds an iteration", "seconds in all", "what it is"]
    return table(header, rows, text_columns=[4]) if rows else ""


def _speed_table(history: History) -> str:
    skip = 1 if any(row["iteration"] > 1 for row in history.trained) else 0
    if not any(row["iteration"] > skip for row in history.trained):
        return ""
    found = performance_rows(history, skip)
    # A pass that never ran has taken some microseconds.
    headers = [header for header in table_headers() if any((row[header] or 0) >= 5e-4 for _, row in found)]
    rows = [[name, *(number(row[header]) for header in headers)] for name, row in found]
    shown = [*rows[:-2][-10:], *rows[-2:]]
    return table(["iteration", *headers], shown) if headers else ""


def _rank_table(history: History) -> str:
    if not history.ranks:
        return ""
    last = [row for row in history.ranks if row["iteration"] == history.ranks[-1]["iteration"]]
    parts = sorted({part for row in last for part, seconds in row["seconds"].items() if seconds})
    rows = [[row["name"], row["host"], *(number(row["seconds"].get(part)) for part in parts)] for row in last]
    return table(["rank", "host", *(f"{part.replace('_', ' ')} s" for part in parts)], rows)


def _compilation_table(history: History) -> str:
    """The kernels that took longest, all workers and iterations together."""
    seconds: Counter[tuple[str, str]] = Counter()
    compiled: Counter[tuple[str, str]] = Counter()
    last: dict[tuple[str, str], int] = {}
    for event in history.jit_events:
        kernel = event["kind"], event["name"]
        seconds[kernel] += event["seconds"]
        compiled[kernel] += bool(event["compiled"])
        last[kernel] = event["iteration"]
    rows: list[list[Any]] = [
        [name, kind, compiled[kind, name], f"{total:.2f}", last[kind, name]]
        for (kind, name), total in seconds.most_common(_MOST_KERNELS)
    ]
    header = ["kernel or communicator", "compiler", "compiled", "seconds, all workers", "last seen in iteration"]
    return table(header, rows, text_columns=[0]) if rows else ""


def _iteration_table(history: History) -> str:
    phases = {f"time/{phase}_seconds" for phase in PHASES.keys() - taken_phases(history).keys()}
    names = [name for name in _TABLE_METRICS if name not in phases and any(name in row for row in history.rows)]
    names += held_out(history.names("eval/"))
    every = math.ceil(len(history.rows) / _MOST_ROWS)
    shown = [*history.rows[:-_LAST_ROWS:every], *history.rows[-_LAST_ROWS:]]
    rows = [
        [row["iteration"], *(text(row[name], unit(name)) if name in row else "" for name in names)] for row in shown
    ]
    note = f"One row in {every}, and the last {_LAST_ROWS}; metrics.jsonl has all." if every > 1 else ""
    told = f"<p class='quiet'>{note}</p>" if note else ""
    return told + table(["iteration", *(label(name) for name in names)], rows)


def _samples(history: History) -> str:
    """The latest on top."""
    shown = "".join(map(_sample, reversed(history.samples)))
    return f"<div class='samples'>{shown}</div>" if shown else ""


def _sample(sample: Mapping[str, Any]) -> str:
    badges = [f"<span>iteration {sample['iteration']}</span>"]
    if "reward" in sample:
        badges.append(f"<span class='badge'>reward {escape(_short(sample['reward']))}</span>")
    if isinstance(sample.get("correct"), bool):
        kind, verdict = ("good", "✓ correct") if sample["correct"] else ("bad", "✗ wrong")
        badges.append(f"<span class='badge {kind}'>{verdict}</span>")
    for name, value in sample.items():
        if name.startswith("component "):
            badges.append(
                f"<span class='badge'>{escape(name.removeprefix('component '))} {escape(_short(value))}</span>"
            )
    texts = "".join(
        f"<small>{name}</small><pre>{escape(str(sample[name]))}</pre>"
        for name in ("prompt", "response", "label", "reason")
        if sample.get(name) not in (None, "")
    )
    return f"<article class='sample'><header>{''.join(badges)}</header>{texts}</article>"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) and abs(value) < 1e15 else str(value)[:40]
