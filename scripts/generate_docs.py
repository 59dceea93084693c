"""Writes docs/configuration.md and docs/metrics.md from the code: `python scripts/generate_docs.py [--check]`.

With --check it writes nothing, and ends with exit code 1 when a page is not what the code says.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import section_of
from rlpipe.config.root import Config
from rlpipe.monitoring.metric_dictionary import METRICS

DOCS = Path(__file__).resolve().parents[1] / "docs"
_HEAD = "<!-- Written by scripts/generate_docs.py: change the code, then run it. -->\n"


def configuration_page() -> str:
    """Every key of a run and of a cluster file, with its type, default and meaning."""
    intro = (
        "# Configuration\n\n"
        "A run is one YAML file. `base:` names files that are merged first, `${section.key}` takes another key's "
        "value, `key.sub=value` on the command line replaces a value (a number stands for an element of a list), and "
        "an unknown key is an error that names the nearest one. `rlpipe config FILE` prints the result.\n"
    )
    parts = [_HEAD, intro, *_sections(Config, "", "Top level")]
    parts.append(
        "\n# Cluster files\n\n"
        "One file in `configs/clusters` for each place where runs go; see [clusters](clusters.md).\n"
    )
    parts += _sections(ClusterConfig, "", "A cluster")
    return "\n".join(parts).rstrip() + "\n"


def metrics_page() -> str:
    """Every metric that may be logged."""
    intro = (
        "# Metrics\n\n"
        "All metrics, as they stand in `metrics.jsonl`, TensorBoard and Weights & Biases. A part in braces is known at "
        "run time. What several ranks report is reduced as the last column says.\n\n"
        "| metric | unit | meaning | over ranks |\n|---|---|---|---|"
    )
    rows = [
        f"| `{metric.name}` | {metric.unit} | {_cell(metric.meaning)} | {metric.reduce.value} |"
        for metric in sorted(METRICS.values(), key=lambda metric: metric.name)
    ]
    return "\n".join([_HEAD, intro, *rows]) + "\n"


def _sections(section: type[BaseModel], prefix: str, title: str) -> Iterator[str]:
    """A table of the section's own keys, then its sections."""
    inner = {name: section_of(section, name) for name in section.model_fields}
    plain = [name for name, below in inner.items() if below is None]
    yield f"\n## {title}\n\n{(section.__doc__ or '').strip()}\n"
    if plain:
        rows = [_row(prefix + name, section.model_fields[name]) for name in plain]
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
    for name, below in inner.items():
        if below is not None:
            yield from _sections(below, f"{prefix}{name}.", f"`{prefix}{name}`")


def _row(key: str, field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "required" if default is PydanticUndefined else f"`{_value(default)}`"
    return f"| `{key}` | {_cell(_type(field.annotation))} | {_cell(shown)} | {_cell(field.description or '')} |"


def _value(value: Any) -> str:
    if value is None:
        return "empty"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _type(annotation: Any) -> str:
    if getattr(annotation, "__name__", "") == "NoneType":
        return "empty"
    if get_origin(annotation) is Annotated:
        return _type(annotation.__origin__)
    if str(annotation).startswith("typing.Literal"):
        return ", ".join(f"`{choice}`" for choice in annotation.__args__)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(part) for part in annotation.__args__)
    return str(annotation).replace("typing.", "") if "[" in str(annotation) else annotation.__name__


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    pages = {DOCS / "configuration.md": configuration_page(), DOCS / "metrics.md": metrics_page()}
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} is not what the code says: run python scripts/generate_docs.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages[path])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
