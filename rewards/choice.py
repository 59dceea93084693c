"""Multiple choice."""

import json
import re
from collections.abc import Mapping, Sequence

from rewards.answers.extract import after_thinking, boxes
from rewards.answers.plain import choice_letter
from rlpipe.shared.sample import Reward

_DECORATION = r"(?:[\s*_$({\[]|\\(?:boxed|text|textbf|mathrm|mathbf)\{){0,20}"
_SAID = re.compile(
    r"(?i:\b(?:answer|correct\s(?:choice|option))\b)\**(?:\s(?i:is|would\sbe|choice|option)\b){0,3}\s?[:=]?"
    rf"{_DECORATION}(?:(?i:choice|option)\s)?\(?(?P<letter>[A-Z])(?![A-Za-z'\u2019])"
)
_WINDOW_CHARACTERS = 4000
_ALONE = re.compile(r"[\s*_$({\[]*([A-Z])[\s*_$)}\].:]*")


def multiple_choice(
    response: str,
    label: str,
    choices: Sequence[str] | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Reward:
    """1 if the chosen letter is the label's, else 0.

    The convention of GPQA (arXiv 2311.12022) in OpenAI's simple-evals: the response ends with "Answer: LETTER". Also
    read: a boxed letter, "the answer is (B)", and a last line that is only a letter; the last statement counts. A label
    that is no letter is looked up in `choices` (or the column `choices` of the row).
    """
    options = choices if choices is not None else _choices_of(metadata or {})
    expected = _letter_of_label(label, options)
    answer = after_thinking(response)
    chosen = chosen_letter(answer)
    if chosen is None:
        return Reward(0.0, False, "no letter found", {"format": 0.0})
    return Reward(
        float(chosen == expected), chosen == expected, f"chose {chosen}, the label is {expected}", {"format": 1.0}
    )


def chosen_letter(text: str) -> str | None:
    """The letter that `text` settles on, None if there is none."""
    found = boxes(text).answers
    if found and (letter := choice_letter(found[-1])):
        return letter
    last_line = text.strip().rpartition("\n")[2].strip()
    if alone := _ALONE.fullmatch(last_line):
        return alone[1]
    said = [match["letter"] for match in _SAID.finditer(text[-_WINDOW_CHARACTERS:])]
    return said[-1] if said else None


def _choices_of(metadata: Mapping[str, object]) -> Sequence[str]:
    column = metadata.get("choices", ())
    if isinstance(column, str):
        column = json.loads(column)
    return [str(choice) for choice in column] if isinstance(column, Sequence) else ()


def _letter_of_label(label: str, choices: Sequence[str]) -> str:
    letter = choice_letter(label.strip())
    if letter is not None and (len(label.strip()) <= len("(A)") or label not in choices):
        return letter
    if label in choices:
        return chr(ord("A") + list(choices).index(label))
    raise ValueError(f"the label {label!r} is neither a letter nor one of the choices {list(choices)!r}")
