"""Questions whose answers stand in a corpus: the policy searches, reads passages, and answers.

The corpus is a folder of texts, split at blank lines, or a .jsonl file with `title` and `text`; without one, a small
encyclopedia of made-up people is written from the seed of the tasks, so that nothing can be known by heart.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from rewards.text import normalize
from rlpipe.environments.protocol import Message, Observation, Task
from rlpipe.environments.tool_task import ToolTask
from rlpipe.environments.tools import Tool, ToolAnswer, tool_of
from rlpipe.shared.errors import DataError

_K1, _B = 1.2, 0.75  # of BM25, as in Robertson and Zaragoza (2009), section 3.5
_TITLE_WEIGHT = 3  # a word of the title counts as so many of the text (BM25F, section 3.6)
_WORD = re.compile(r"\w+")
_TEXTS = (".txt", ".md", ".rst")
_MADE = "made"
_NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ida", "Jo", "Kai", "Lou", "Mia", "Ned", "Ola", "Pam")
_TOWNS = ("Arl", "Bex", "Cork", "Dun", "Ely", "Fowey", "Goole", "Hove", "Ilam", "Jura", "Kew", "Leek")
_TRADES = ("baker", "cooper", "dyer", "farrier", "glover", "miller", "potter", "tanner")


@dataclass(frozen=True)
class Passage:
    """A piece of the corpus."""

    title: str
    text: str


class Corpus:
    """Passages, found by their words (BM25)."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._words = [Counter(_TITLE_WEIGHT * _words(one.title) + _words(one.text)) for one in passages]
        self._lengths = [sum(words.values()) for words in self._words]
        self._mean_length = sum(self._lengths) / max(1, len(passages))
        self._holding = Counter(word for words in self._words for word in words)

    def best(self, query: str, count: int) -> list[Passage]:
        """The `count` passages that fit best, of those that hold any word of the query; ties in order of the corpus."""
        wanted = set(_words(query))
        scores = [self._score(wanted, index) for index in range(len(self._passages))]
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [self._passages[index] for index in ranked[:count] if scores[index] > 0]

    def _score(self, wanted: set[str], index: int) -> float:
        words, score = self._words[index], 0.0
        for word in wanted & words.keys():
            holding = self._holding[word]
            rarity = math.log(1 + (len(self._passages) - holding + 0.5) / (holding + 0.5))
            length = 1 - _B + _B * self._lengths[index] / self._mean_length
            score += rarity * words[word] * (_K1 + 1) / (words[word] + _K1 * length)
        return score


class Search(ToolTask):
    """Answers are right where they equal the row's label or one of its alternatives, a JSON list, word by word."""

    def __init__(self, corpus: str | None = None, passages: PositiveInt = 2, hops: PositiveInt = 2) -> None:
        super().__init__()
        self._corpus = read_corpus(corpus or _MADE)
        self._passages = passages
        self._hops = hops
        self._label = ""

    @property
    def tools(self) -> Sequence[Tool]:  # type: ignore[override]
        return (tool_of(self.search),)

    def search(self, query: str) -> str:
        """Passages of the corpus that fit the words of the query best."""
        found = self._corpus.best(query, self._passages)
        return "\n".join(f"{passage.title}: {passage.text}" for passage in found) or "nothing found"

    def tasks(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Questions to the made-up encyclopedia, with a right way to answer each in `steps`; those of two hops go over
        another person's entry."""
        people = _people()
        ways = [(f"where does {name} live?", [name]) for name in people]
        if self._hops > 1:
            asked = "where does the teacher of {} live?"
            ways += [(asked.format(name), [name, person["teacher"]]) for name, person in people.items()]
        random.Random(f"search {seed}").shuffle(ways)
        for question, names in ways[:count]:
            town = people[names[-1]]["town"]
            steps = "".join(f"<<{name}>>\n{self.search(name)}\n" for name in names)
            yield {"prompt": question, "label": town, "steps": f"{steps}Answer: {town}"}

    async def reset(self, task: Task) -> Observation:
        self._label = task.label
        return Observation()

    async def answered(self, text: str) -> tuple[bool, float]:
        given = normalize(text.rpartition("Answer:")[2])
        right = any(given == normalize(one) for one in _alternatives(self._label))
        return right, float(right)

    def told(self, answers: Sequence[ToolAnswer]) -> Observation:
        return Observation(tuple(Message("tool", f"\n{answer.text}\n", {"name": "search"}) for answer in answers))


@cache
def read_corpus(place: str) -> Corpus:
    """The corpus of a folder or file, read once per process. Raises DataError where there is no text."""
    if place == _MADE:
        return Corpus([Passage(name, _entry(person)) for name, person in _people().items()])
    path = Path(place)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _TEXTS)
        passages = [Passage(file.stem, piece) for file in files for piece in _pieces(file.read_text(errors="replace"))]
    elif path.is_file():
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        passages = [Passage(str(row.get("title", "")), str(row["text"])) for row in rows]
    else:
        passages = []
    if not passages:
        raise DataError(f"environment 'search': {place} holds no text: give a .jsonl file or a folder of {_TEXTS}")
    return Corpus(passages)


def _pieces(text: str) -> Iterator[str]:
    return (piece.strip() for piece in re.split(r"\n\s*\n", text) if piece.strip())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _alternatives(label: str) -> list[str]:
    values = json.loads(label) if label.startswith("[") else [label]
    return [str(value) for value in values]


@cache
def _people() -> dict[str, dict[str, str]]:
    """Made-up people; the same in every process and run."""
    generator = random.Random("encyclopedia")
    names = [f"{first} {last}" for first in _NAMES for last in ("Ash", "Birch", "Elm", "Fir", "Oak", "Yew")]
    return {
        name: {
            "town": generator.choice(_TOWNS),
            "trade": generator.choice(_TRADES),
            "teacher": generator.choice([other for other in names if other != name]),
        }
        for name in names
    }


def _entry(person: dict[str, str]) -> str:
    return f"{person['trade']} of {person['town']}, pupil of {person['teacher']}."
