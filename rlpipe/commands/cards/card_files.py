"""Cards as they are written (cards/KIND.yaml), and how they stand by what was recorded and the code that is there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from rlpipe.commands.cards.code_digest import present_digest
from rlpipe.commands.cards.record_file import Record, read_record
from rlpipe.config.base import Section
from rlpipe.config.strict_yaml import StrictYamlError, load_yaml
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.project_files import CARDS, RECORDS, ROOT

Status = Literal["seen", "seen in part", "stale", "unknown", "never run"]


class Card(Section):
    """A claim, and what shows it."""

    claim: str = Field(min_length=10)
    """One sentence: what was seen, or is yet to be."""

    command: str = Field(min_length=1)
    """What shows it, in the root of the repository."""

    code: list[str] = Field(min_length=1)
    """Files and folders that it is about: once they change, the card is stale."""

    records: list[str] = Field(default_factory=list)
    """Names in benchmarks/results, without .json, of what the command printed. None: it was never run."""

    numbers: dict[str, str] = Field(default_factory=dict)
    """What a reader looks at -> regular expression whose one group finds it in the first record that has it."""

    says: dict[str, list[str]] = Field(default_factory=dict)
    """Page -> its words that claim this; every figure among them stands in `numbers`."""

    @field_validator("numbers")
    @classmethod
    def _patterns_have_one_group(cls, numbers: dict[str, str]) -> dict[str, str]:
        for name, pattern in numbers.items():
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"{name}: {pattern!r} is not a regular expression: {error}") from None
            if groups != 1:
                raise ValueError(f"{name}: {pattern!r} has {groups} groups; mark the number with one")
        return numbers


@dataclass(frozen=True)
class CardState:
    """A card with what was recorded for it. kind: the file that it stands in."""

    name: str
    kind: str
    card: Card
    records: tuple[Record, ...]
    status: Status

    @property
    def newest(self) -> Record | None:
        """The record that was made last."""
        return max(self.records, key=lambda record: record.date, default=None)

    def numbers(self) -> dict[str, str]:
        """Each of the card's numbers as a record holds it; one that none holds is left out."""
        found = {}
        for name, pattern in self.card.numbers.items():
            matches = (re.search(pattern, record.output, re.MULTILINE) for record in self.records)
            if match := next(filter(None, matches), None):
                found[name] = match[1].strip()
        return found


def read_cards(folder: Path = CARDS) -> dict[str, tuple[str, Card]]:
    """Kind and card by name. Raises ConfigError for what does not follow the schema and for a second name."""
    found: dict[str, tuple[str, Card]] = {}
    for file in sorted(folder.glob("*.yaml")):
        for name, tree in _tree(file).items():
            if name in found:
                raise ConfigError(f"{file}: the card {name} stands in {found[name][0]}.yaml too: rename one")
            try:
                found[name] = (file.stem, Card.model_validate(tree))
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"]))
                raise ConfigError(f"{file}: card {name}: {place}: {first['msg']}") from None
    if not found:
        raise ConfigError(f"{folder}: there are no cards; they lie in the repository, in cards/*.yaml")
    return found


def card_states(cards: Path = CARDS, records: Path = RECORDS, root: Path = ROOT) -> list[CardState]:
    """All cards as they stand today, in the order of their files."""
    states = []
    for name, (kind, card) in read_cards(cards).items():
        found = tuple(read_record(records / f"{record}.json") for record in card.records)
        states.append(CardState(name, kind, card, found, _status(name, found, present_digest(root, card.code))))
    return states


def _status(name: str, records: tuple[Record, ...], present: str) -> Status:
    """`seen`: every record was made with the code that is there; `seen in part`: some were. `unknown`: the code, or
    what it was, is not there."""
    if not records:
        return "never run"
    recorded = [record.code.get(name, "") for record in records]
    if not present or not any(recorded):
        return "unknown"
    fresh = recorded.count(present)
    return "seen" if fresh == len(recorded) else "seen in part" if fresh else "stale"


def _tree(file: Path) -> dict[str, object]:
    try:
        tree = load_yaml(file.read_text())
    except StrictYamlError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: cards are a mapping from names to claims")
    return tree
