"""Writes the pages configuration, metrics, upgrading and cards, the table of recipes and the README's list of what was
never run, from the code: `python scripts/generate_docs.py [--check]`.

With --check it writes nothing, and ends with exit code 1 when a page is not what the code says.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from recipe_table import recipe_rows
from replaced_parts import DISTRIBUTIONS, Part, declared_parts, read_record

from rlpipe.commands.cards.card_files import CardState, card_states
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import section_of
from rlpipe.config.root import Config
from rlpipe.monitoring.metric_dictionary import METRICS

DOCS = Path(__file__).resolve().parents[1] / "docs"
_HEAD = "<!-- Written by scripts/generate_docs.py: change the code, then run it. -->\n"
_BEGIN = "<!-- Written by scripts/generate_docs.py from cards/*.yaml. -->\n"
_END = "<!-- End of what is written. -->"


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


def recipes_page() -> str:
    """The page as it is written by hand, with the table of what `rlpipe plan` says of every recipe."""
    head, *rows = recipe_rows()
    intro, found, _ = (DOCS / "recipes.md").read_text().partition(head)
    return "\n".join([intro.rstrip() + "\n", head, *rows]) + "\n" if found else ""


def upgrading_page() -> str:
    """Every part of another package that is replaced, or used although it is private."""
    intro = (
        "# Upgrading other packages\n\n"
        "Parts of other packages that are replaced, or used although nobody promises that they stay. SGLang and "
        "megatron-core are refused in any version but the one they were read in; of torch, Ray and compilers a part "
        "that is gone is refused by name where it is needed.\n\n"
        "Before an upgrade, unpack the new version and look at it:\n\n"
        "    pip install --no-deps --target /tmp/new ray==2.61.0\n"
        "    python scripts/replaced_parts.py --in /tmp/new\n\n"
        "It prints each original that is not what was read, with the place of ours to look at. Read the difference, "
        "change our side where that is needed, then note it as read: `python scripts/replaced_parts.py --in /tmp/new "
        "--accept TARGET`. Without `--in` it looks at what is installed, as a test does, and also prints places that "
        "reach into another package without a declaration. `not here` are packages that are not installed.\n\n"
        "To declare a part, see `rlpipe/shared/replaced_parts.py`. The last column has a version for each text of "
        "the part that was read, the first one in which it was seen. Where requirements/cpu.txt and gpu.txt have "
        "different versions of its package, read it in both, the other one by `--in`: otherwise only a test on a GPU "
        "finds out (`gpu_kernels`)."
    )
    record = read_record()
    pages = [_HEAD, intro]
    parts = sorted(declared_parts(), key=lambda part: (part.target, part.file))
    for package, name in sorted(DISTRIBUTIONS.items(), key=lambda item: item[1]):
        rows = [_part_row(part, record.get(part.target, {})) for part in parts if part.package == package]
        if rows:
            head = "| part | here | why | until | read in |\n|---|---|---|---|---|"
            pages.append("\n".join([f"\n## {name}\n", head, *rows]))
    return "\n".join(pages) + "\n"


def cards_page() -> str:
    """Every card with what was recorded for it. Whether its code has changed since is not here: it changes daily."""
    intro = (
        "# Cards\n\n"
        "A card is a claim, the command that shows it, the code that it is about, and what the command printed when it "
        "was recorded: where, when, with which commit. README and pages claim what a card holds.\n\n"
        "    rlpipe cards                    # how each stands today\n"
        "    rlpipe cards packing            # one with all that is known of it\n"
        "    rlpipe cards layouts            # all of a kind\n\n"
        "`seen`: its records were made with this code; `seen in part`: some of them. `stale`: the code has changed "
        "since. `never run`: nothing is recorded. `unknown`: the sources are not here, as in an installed package.\n\n"
        "Cards stand in `cards/*.yaml`, records in `benchmarks/results`. `python benchmarks/record.py NAME` runs a "
        "benchmark or a suite of tests and records it; a new card of an old record takes its code from that commit by "
        "`python benchmarks/record.py --cards`. Figures are found in the record by a pattern: none is typed by hand."
    )
    states = card_states()
    pages = [_HEAD, intro]
    for kind in dict.fromkeys(state.kind for state in states):
        head = "| card | claim | command | recorded | figures |\n|---|---|---|---|---|"
        rows = [_card_row(state) for state in states if state.kind == kind]
        pages.append("\n".join([f"\n## {kind.capitalize()}\n", head, *rows]))
    return "\n".join(pages) + "\n"


def _card_row(state: CardState) -> str:
    recorded = "<br>".join(f"{one.date}, {one.host}, {one.commit}" for one in state.records) or "never run"
    figures = "<br>".join(f"{name}: {number}" for name, number in state.numbers().items())
    cells = (state.name, state.card.claim, f"`{state.card.command}`", recorded, figures)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def readme() -> str:
    """The README as it is written by hand, with where records were made and the cards of which there is none."""
    head, begin, rest = (DOCS.parent / "README.md").read_text().partition(_BEGIN)
    states = card_states()
    hosts = sorted({record.host.partition(" cores")[2] or record.host for state in states for record in state.records})
    lines = [
        f"Recorded on {'; '.join(sorted(_machine(host) for host in hosts))}. Never run, or run and not recorded:",
        "",
    ]
    for kind in dict.fromkeys(state.kind for state in states):
        never = [state.name for state in states if state.kind == kind and state.status == "never run"]
        lines += [f"- {kind}: {'; '.join(_shortened(never, states))}"] if never else []
    return "\n".join([head + begin, *lines, ""]) + rest[rest.index(_END) :]


def _machine(host: str) -> str:
    """What a reader asks for: the GPUs, or the processor where there are none."""
    return host.partition(", ")[2].replace(" x GPU ", " x ") or f"CPU ({host.removeprefix(' of ')})"


def _shortened(names: list[str], states: list[CardState]) -> list[str]:
    """Names with those of `recipes/` as one, where more of them are named than left out."""
    recipes = [state.name for state in states if state.name.startswith("recipes/")]
    others = [name.removeprefix("recipes/") for name in recipes if name not in names]
    if 2 * len(others) >= len(recipes):
        return names
    but = f" but {', '.join(others)}" if others else ""
    return [*(name for name in names if name not in recipes), f"all of `configs/recipes`{but}"]


def _part_row(part: Part, versions: dict[str, str]) -> str:
    how = "replaced" if part.replaced else "used"
    texts = f" (the words {', '.join(map(repr, part.texts))})" if part.texts else ""
    read = ", ".join(sorted(set(versions.values()))) or "never"
    return f"| `{part.target}`{texts} | {how} in `{part.file}` | {_cell(part.why)} | {_cell(part.drop_when)} | {read} |"


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
    pages |= {DOCS / "upgrading.md": upgrading_page(), DOCS / "recipes.md": recipes_page()}
    pages |= {DOCS / "cards.md": cards_page(), DOCS.parent / "README.md": readme()}
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
