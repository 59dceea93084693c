"""What is wrong with a row, in a few words. Pure functions of one row, so that they can be mapped over many."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.config.data import DatasetConfig
from rlpipe.data.chat_messages import MessageProblem, template_message, template_tools

MAX_ROW_BYTES = 16 * 2**20


def row_problem(values: Any, dataset: DatasetConfig, with_label: bool = True) -> str | None:
    """Why the row cannot be used; None where it can. `with_label`: the label column is needed."""
    if not isinstance(values, Mapping):
        return f"a JSON object is needed, but this is {_kind(values)}"
    columns: list[tuple[str, str, Callable[[Any], str | None]]] = [("prompt", dataset.prompt_column, _prompt_problem)]
    if with_label:
        columns.append(("label", dataset.label_column, _label_problem))
    for role, column, problem_of in columns:
        where = f"column {column!r} (data set {dataset.name!r}, {role})"
        if column not in values:
            return f"{where} is missing; set its {role}_column to one of the columns {_columns(values)}"
        if values[column] in (None, "", []):
            return f"{where} is empty"
        if problem := problem_of(values[column]):
            return f"{where} {problem}"
    return _tools_problem(values, dataset)


def messages_problem(messages: Any) -> str | None:
    """Why a list of chat messages cannot be rendered."""
    if not isinstance(messages, list) or not messages:
        return "must be text or a list of messages with `role` and `content`"
    forms = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "from"} & set(message):
            return f"has message {index} without `role` and `content`"
        try:
            forms.append(template_message(message))
        except MessageProblem as problem:
            return f"has message {index} whose {problem}"
    if not any(form["content"].strip() or form.get("tool_calls") for form in forms):
        return "has only blank messages"
    return None


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        if len(prompt) > MAX_ROW_BYTES:
            return f"has {len(prompt):,} characters, more than {MAX_ROW_BYTES:,}"
        return None if prompt.strip() else "is blank"
    return messages_problem(prompt)


def _tools_problem(values: Mapping[str, Any], dataset: DatasetConfig) -> str | None:
    if dataset.tools_column is None:
        return None
    where = f"column {dataset.tools_column!r} (data set {dataset.name!r}, tools)"
    if dataset.tools_column not in values:
        return f"{where} is missing; set its tools_column to one of the columns {_columns(values)}"
    try:
        template_tools(values[dataset.tools_column])
    except MessageProblem as problem:
        return f"{where} {problem}"
    return None


def _label_problem(label: Any) -> str | None:
    if isinstance(label, str):
        return None if label.strip() else "is blank"
    if isinstance(label, float) and not math.isfinite(label):
        return f"is {label}, not a finite number"
    if isinstance(label, int | float) and not isinstance(label, bool):
        return None
    return f"is {_kind(label)}, but a label is text or a number; write anything else as JSON text"


def _columns(values: Mapping[str, Any]) -> str:
    names = [
        ascii(str(name)[:40]) if not str(name).isprintable() else repr(str(name)[:40])
        for name in sorted(values, key=str)
    ]
    return f"[{', '.join(names[:10])}{', ...' if len(names) > 10 else ''}]"


def _kind(value: Any) -> str:
    return (
        "null" if value is None else {bool: "true or false", dict: "an object"}.get(type(value), type(value).__name__)
    )
