"""Where the answer stands in a response. Every search is linear in the length of the text."""

import json
import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_PHRASE_WINDOW_CHARACTERS = 4000
_PHRASE = re.compile(
    r"(?:\banswer(?:\s+to\s+[^\n.:]{1,80})?(?:\s+is|\s*[:=])(?:\s*:)?)[ \t*]*(?P<value>[^\n]+)", re.IGNORECASE
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?\s?\\?[$\u00a3\u20ac]?\s?"
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+/\d+|\d+(?:\.\d+)?|\.\d+)(?:\s?\\?%)?(?![\w])"
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
    found: list[tuple[int, int, str]] = []
    cut = False
    for match in _BOX.finditer(text):
        end = match.end()
        if end < len(text) and text[end] != "{":
            word = re.compile(r"[^\s$\\{}]+").match(text, end)
            if word:
                found.append((match.start(), word.end(), word.group().rstrip(".,;")))
            continue
        close = _closing_brace(text, end)
        cut = close is None and "\n" not in text[end:].strip()
        if close is not None:
            found.append((match.start(), close + 1, text[end + 1 : close].strip()))
    # A box inside a box is part of the outer one.
    outer = [box for index, box in enumerate(found) if not (index and box[0] < found[index - 1][1])]
    return Boxes(tuple(content for _, _, content in outer), _join(text, outer), cut)


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return None


def _join(text: str, found: list[tuple[int, int, str]]) -> str | None:
    if not found:
        return None
    start, _, content = found[-1]
    contents = [content]
    for earlier_start, earlier_end, earlier in reversed(found[:-1]):
        if (
            not re.fullmatch(
                r"[\s$,;.\\()\[\]]*(?:(?:and|or|\\text\{\s*(?:and|or)\s*\}))?[\s$,;\\()\[\]]*",
                text[earlier_end:start][:60],
            )
            or start - earlier_end > 60
        ):
            break
        contents.insert(0, earlier)
        start = earlier_start
    return ", ".join(dict.fromkeys(contents))


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text if there is none."""
    return text.rpartition("</think>")[2]


def after_phrase(text: str) -> str | None:
    """The rest of the line after the last "answer is" or "answer:"."""
    last = None
    for match in _PHRASE.finditer(text[-_PHRASE_WINDOW_CHARACTERS:]):
        last = match.group("value").strip().strip("*").strip()
    return last or None


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
        last = match.group()
    return last


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
