"""Pieces of HTML that pages are made of."""

from collections.abc import Sequence
from html import escape
from typing import Any

from rlpipe.monitoring.report.style import style


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page of `parts`, which are HTML; needs no script and no network."""
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{style()}</style></head>"
    )
    return "\n".join([head, "<body><main>", f"<h1>{escape(title)}</h1>", *parts, "</main></body></html>"])


def section(title: str, body: str) -> str:
    """`body` under a heading; nothing where there is no body."""
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], text_columns: Sequence[int] = ()) -> str:
    """A table that scrolls sideways where it is too wide. Cells are escaped, unless they are `Raw`."""
    head = "".join(f"<th{_kind(n, text_columns)}>{_cell(cell)}</th>" for n, cell in enumerate(header))
    body = "".join(
        "<tr>" + "".join(f"<td{_kind(n, text_columns)}>{_cell(cell)}</td>" for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    long = " long" if len(rows) > 16 else ""
    return f"<div class='scroll{long}' tabindex='0'><table><tr>{head}</tr>{body}</table></div>"


def cards(facts: Sequence[tuple[str, str]]) -> str:
    """A few large figures, each (what it is, value)."""
    return (
        "<div class='cards'>"
        + "".join(
            f"<div class='card'><small>{escape(name)}</small><b>{escape(value)}</b></div>" for name, value in facts
        )
        + "</div>"
    )


class Raw(str):
    """HTML that is not escaped again."""


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _kind(column: int, text_columns: Sequence[int]) -> str:
    return " class='text'" if column in text_columns else ""


def _cell(cell: Any) -> str:
    return cell if isinstance(cell, Raw) else escape(str(cell))
