"""Where the answer stands in a response. Every search is linear in the length of the text."""

import json
import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_TOKEN = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)(?![a-zA-Z])\s*(?P<word>[^\s$\\{}.,;]{1,50}(?:[.,]\d{1,50})?)"
    r"|\\.|(?P<brace>[{}])",
    re.DOTALL,
)
_SEPARATOR = re.compile(
    r"[\s$,;\\()\[\]]{0,30}(?:(?:and|or)\b|\\text\{\s{0,3}(?:and|or)\s{0,3}\})?[\s$,;\\()\[\]]{0,30}(?:[a-zA-Z]\s?=\s?)?"
)
_PHRASE_WINDOW_CHARACTERS = 4000
_PHRASE = re.compile(
    r"\banswer\b(?:\s+(?:to|for|of)\s[^\n.:]{1,80}?)?\**(?:\s+(?:is|would\s+be|should\s+be|equals)\b|\s*[:=]|\s*\n)[\s*:#]*",
    re.IGNORECASE,
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?\s?\\?[$\u00a3\u20ac]?\s?"
    r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?|\d+/\d+|\d+(?:\.\d+)?|\.\d+|\\[dt]?frac\{-?\d+\}\{\d+\})"
    r"(?:\s?\\?%)?(?!\d|(?:st|nd|rd|th)\b)"
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


@dataclass(frozen=True)
class Boxes:
    """The boxed answers of a text.

    `answers` are the contents of all closed boxes, in order. `joined` is the last box together with those right
    before it ("\\boxed{1} and \\boxed{2}" is "1, 2"). `cut` tells that the text ends inside a box.
    """

    answers: tuple[str, ...]
    joined: str | None
    cut: bool


def boxes(text: str) -> Boxes:
    """All `\\boxed{...}` (or `\\fbox`, or `\\boxed 5`) of `text`; braces are matched, escaped ones are not counted."""
    found, unclosed = _box_spans(text)
    # A box inside a box is part of the outer one.
    outer: list[tuple[int, int, int]] = []
    for span in sorted(found):
        if not outer or span[0] >= outer[-1][2]:
            outer.append(span)
    last_end = outer[-1][2] if outer else 0
    cut = unclosed is not None and unclosed >= last_end and "\n" not in text[unclosed:].strip()
    contents = tuple(text[inside:end].removesuffix("}").strip() for _, inside, end in outer)
    return Boxes(contents, _join(text, outer, contents), cut)


def _box_spans(text: str) -> tuple[list[tuple[int, int, int]], int | None]:
    """Start, start of the content and end of every closed box; and where the last unclosed one starts."""
    spans: list[tuple[int, int, int]] = []
    open_braces: list[tuple[int, int] | None] = []  # of a box: its start and the start of its content
    first = _BOX.search(text)
    for token in _TOKEN.finditer(text, first.start()) if first else ():
        if token["word"]:
            spans.append((token.start(), token.start("word"), token.end()))
        elif token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token["brace"] == "{":
            open_braces.append(None)
        elif token["brace"] == "}" and open_braces:
            box = open_braces.pop()
            if box is not None:
                spans.append((*box, token.end()))
    unclosed = [box for box in open_braces if box is not None]
    return spans, unclosed[-1][0] if unclosed else None


def _join(text: str, spans: list[tuple[int, int, int]], contents: tuple[str, ...]) -> str | None:
    """The last box with those before it that only a separator parts from it."""
    if not spans:
        return None
    first = len(spans) - 1
    while first > 0 and _SEPARATOR.fullmatch(text, spans[first - 1][2], spans[first][0]):
        first -= 1
    return ", ".join(dict.fromkeys(contents[first:]))


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text if there is none."""
    return text.rpartition("</think>")[2]


def after_phrase(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or heading "Answer": a formula, or the rest of the line."""
    tail = text[-_PHRASE_WINDOW_CHARACTERS:]
    last = None
    for match in _PHRASE.finditer(tail):
        formula = _MATH.match(tail, match.end())
        line = tail[match.end() :].partition("\n")[0]
        said = formula.group() if formula and len(formula.group()) > len(line) else line.strip().strip("*").strip()
        last = said or last
    return last


def last_math(text: str) -> str | None:
    """The content of the last `$...$`, `\\(...\\)` or `\\[...\\]`."""
    last = None
    for match in _MATH.finditer(text[-_PHRASE_WINDOW_CHARACTERS:]):
        last = next(group for group in match.groups() if group is not None)
    return last


def last_number(text: str) -> str | None:
    """The last number, with its sign, thousands separators and percent sign."""
    last = None
    for match in _NUMBER.finditer(text[-_PHRASE_WINDOW_CHARACTERS:]):
        last = match.group().strip()
    return last


def first_number(text: str) -> str | None:
    """The first number, as `last_number`."""
    match = _NUMBER.search(text)
    return match.group().strip() if match else None


def first_sentence(text: str) -> str:
    """`text` up to the first full stop that ends a sentence."""
    return _SENTENCE_END.split(text, maxsplit=1)[0]


def label_answers(label: str) -> tuple[str, ...]:
    """The accepted answers of a label: after `####`, in `\\boxed`, the strings of a JSON list, or the label itself."""
    label = label.strip()
    if label.startswith("["):
        try:
            values = json.loads(label)
        except ValueError:
            values = None
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            return tuple(values)
    if "####" in label:
        return (label.rpartition("####")[2].strip(),)
    boxed = boxes(label).joined
    return (boxed if boxed else label,)
