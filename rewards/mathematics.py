"""Graders of mathematical answers. They differ in where they look for the answer and in the scores they give."""

import re
from dataclasses import dataclass

from rewards.answers.equivalence import equivalent
from rewards.answers.extract import (
    after_phrase,
    after_thinking,
    boxes,
    first_number,
    first_sentence,
    label_answers,
    last_math,
    last_number,
)
from rewards.answers.plain import number, tidy
from rlpipe.shared.sample import Reward

_SHOWN_CHARACTERS = 80
_HASHES = re.compile(r"####[ \t]{0,3}(?P<value>[-+\\$ ]{0,5}[\d.,]*\d[\d.,]*)(?P<rest>[^\n]*)")
_HEADING = re.compile(r"\s*[.:)]\s+\w{3}|\s+[A-Z]\w{2}")
_ANSWER_LINE = re.compile(r"Answer\s{0,3}:\s{0,3}([^\n]+)", re.IGNORECASE)
_SEVERAL = re.compile(r",|\\text\s*\{\s*(?:and|or)\s*\}|\\pm| and | or ")


@dataclass(frozen=True)
class _Found:
    """Candidates for the answer, best first; `as_told`: they stood where the convention wants them."""

    candidates: list[str]
    source: str
    as_told: bool


def math(response: str, label: str) -> Reward:
    r"""1 if the last boxed answer, or without a box the answer in the text, equals the label, else 0.

    The convention of the MATH benchmark (arXiv 2103.03874): the last `\boxed` counts, and a box that the end of the
    response cuts off is no answer. Boxes side by side answer a label that has several values. Without a box: the number
    after `####`, else what follows the last "answer is" or "answer:", else the last number (for a label that is one),
    else the last formula. The component `format` tells whether there was a box.
    """
    return _reward(_boxed_or_free(response, label), label)


def deepscaler(response: str, label: str) -> Reward:
    r"""1 if the last box after `</think>` equals the label, else 0; without `</think>` or box 0.

    The reward of DeepScaleR (Agentica, 2025), as also used by slime, which accepts `###Response` as the end of thinking
    too. Several accepted answers are a JSON list.
    """
    _, mark, answer = response.rpartition("</think>")
    if not mark:
        _, mark, answer = response.rpartition("###Response")
    found = boxes(answer)
    if not mark or found.cut or not found.answers:
        missing = "no closed \\boxed after </think>" if mark else "no </think>"
        return _reward(_Found([], missing, False), label)
    return _reward(_Found(_by_label(found.answers[-1], found.joined, label), "box", True), label)


def dapo(response: str, label: str, window_characters: int = 300) -> Reward:
    """+1 if the last line "Answer: ..." equals the label, else -1.

    The reward of DAPO (arXiv 2503.14476, section 2.4, and its released verifier): the response must end with a line
    "Answer: $Answer", searched in its last `window_characters`. `correct` is the accuracy flag.
    """
    lines = _ANSWER_LINE.findall(response[-window_characters:])
    boxed = boxes(lines[-1]).answers if lines else ()
    candidates = [boxed[-1] if boxed else lines[-1].strip("* ")] if lines else []
    verdict = _reward(_Found(candidates, "Answer: line", bool(lines)), label)
    return Reward(1.0 if verdict.correct else -1.0, verdict.correct, verdict.reason, verdict.components)


def gsm8k(response: str, label: str, strict: bool = False) -> Reward:
    """1 if the number after `####`, or without it the answer in the text, equals the label's number, else 0.

    The convention of GSM8K (arXiv 2110.14168): the solution ends with `#### number`; thousands separators do not count.
    Free text is read as in `math`; `strict` refuses it. The label may be the whole reference solution.
    """
    hashed = _after_hashes(response)
    if hashed is not None:
        return _reward(_Found([hashed], "####", True), label)
    if strict:
        return _reward(_Found([], "no '#### number'", False), label)
    found = _boxed_or_free(response, label)
    return _reward(_Found(found.candidates, found.source, False), label)


def _after_hashes(text: str) -> str | None:
    """The first `#### number` that is not a heading such as `#### 1. Cost`, else what a last line `#### ...` holds."""
    for match in _HASHES.finditer(text):
        if not _HEADING.match(match["rest"]):
            return match["value"].rstrip(".,")
    last_line = text.rstrip().rpartition("\n")[2]
    return last_line.removeprefix("####").strip() if last_line.startswith("####") else None


def _boxed_or_free(response: str, label: str) -> _Found:
    found = boxes(response)
    if found.cut:
        return _Found([], "the last \\boxed is cut off", False)
    if found.answers:
        return _Found(_by_label(found.answers[-1], found.joined, label), "box", True)
    return _Found(_free_text(after_thinking(response), label), "free text", False)


def _by_label(last: str, joined: str | None, label: str) -> list[str]:
    """The last box; boxes side by side only for a label with several values."""
    if joined is None or joined == last:
        return [last]
    several = any(_SEVERAL.search(answer) for answer in label_answers(label))
    return [joined, last] if several else [last]


def _free_text(text: str, label: str) -> list[str]:
    hashed = _after_hashes(text)
    if hashed is not None:
        return [hashed]
    numeric = all(number(tidy(value)) is not None for value in label_answers(label))
    phrase = after_phrase(text)
    guess = _said(phrase, numeric) if phrase is not None else None
    if guess is None:
        guess = (last_number(text) if numeric else None) or last_math(text) or last_number(text)
    return [guess] if guess else []


def _said(phrase: str, numeric: bool) -> str | None:
    """The answer in what follows "the answer is"."""
    formula = last_math(phrase)
    if formula is not None:
        return formula.rpartition("=")[2] if numeric else formula
    sentence = first_sentence(phrase).strip()
    if numeric:
        return first_number(sentence.rpartition("=")[2]) or first_number(sentence)
    return sentence or None


def _reward(found: _Found, label: str) -> Reward:
    components = {"format": float(found.as_told)}
    if not found.candidates:
        return Reward(0.0, False, f"no answer found: {found.source}", components)
    answers = label_answers(label)
    expected = repr(answers[0][:_SHOWN_CHARACTERS])
    for candidate in found.candidates:
        if any(equivalent(candidate, answer) for answer in answers):
            return Reward(1.0, True, f"{found.source}: {candidate[:_SHOWN_CHARACTERS]!r} equals {expected}", components)
    shown = repr(found.candidates[0][:_SHOWN_CHARACTERS])
    return Reward(0.0, False, f"{found.source}: {shown} is not {expected}", components)
