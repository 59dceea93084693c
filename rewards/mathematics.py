"""Graders of mathematical answers. They differ in where they look for the answer and in the scores they give."""

import re

from rewards.answers.equivalence import equivalent
from rewards.answers.extract import (
    after_phrase,
    after_thinking,
    boxes,
    first_sentence,
    label_answers,
    last_math,
    last_number,
)
from rlpipe.sample import Reward

_SHOWN_CHARACTERS = 80
_HASHES = re.compile(r"####[ \t]*(?P<value>\\?[$]?[ \t]*-?[ \t]*\\?[$]?[ \t]*[\d.,]*\d[\d.,]*)[ \t]*(?P<rest>[^\n]*)")
_ANSWER_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)


def math(response: str, label: str) -> Reward:
    """1 if the last boxed answer, or without a box the answer in the text, equals the label, else 0.

    The convention of the MATH benchmark (Hendrycks et al., arXiv 2103.03874): the last `\\boxed` counts; a box that the
    end of the response cuts off is no answer. Boxes side by side answer a label that has several values. Without a
    box: the number after `####`, else what follows the last "answer is" or "answer:", else the last number (for a
    label that is one), else the last formula.
    """
    candidates, reason = _boxed_or_free(response, label)
    return _verdict(candidates, label, reason)


def deepscaler(response: str, label: str) -> Reward:
    """1 if the last box after `</think>` equals the label, else 0; without `</think>` or box 0.

    The reward of DeepScaleR (Agentica, 2025), which also accepts `###Response` as the end of thinking.
    """
    if "</think>" not in response and "###Response" not in response:
        return Reward(0.0, False, "no </think>")
    answer = after_thinking(response).rpartition("###Response")[2]
    found = boxes(answer)
    if found.cut or not found.answers:
        return Reward(0.0, False, "no closed \\boxed after </think>")
    return _verdict(_by_label(found.answers[-1], found.joined, label), label, "box")


def dapo(response: str, label: str, window_characters: int = 300) -> Reward:
    """+1 if the last line "Answer: ..." equals the label, else -1.

    The reward of DAPO (arXiv 2503.14476, section 4.1 and its released verifier): the response must end with a line
    "Answer: $Answer", searched in its last `window_characters`. `correct` is the accuracy flag.
    """
    lines = _ANSWER_LINE.findall(response[-window_characters:])
    if not lines:
        return Reward(-1.0, False, f"no 'Answer:' in the last {window_characters} characters")
    answer = lines[-1].strip()
    boxed = boxes(answer).answers
    verdict = _verdict([boxed[-1] if boxed else answer], label, "Answer: line")
    return Reward(1.0 if verdict.correct else -1.0, verdict.correct, verdict.reason)


def gsm8k(response: str, label: str, strict: bool = False) -> Reward:
    """1 if the number after `####`, or without it the answer in the text, equals the label's number, else 0.

    The convention of GSM8K (Cobbe et al., arXiv 2110.14168): the solution ends with `#### number`; thousands separators
    do not count. Free text is read as in `math`; `strict` refuses it. The label may be the whole reference solution.
    """
    hashed = _after_hashes(response)
    if hashed is not None:
        return _verdict([hashed], label, "####")
    if strict:
        return Reward(0.0, False, "no '#### number'")
    candidates, reason = _boxed_or_free(response, label)
    return _verdict(candidates, label, reason)


def _after_hashes(response: str) -> str | None:
    """The first `#### number` that fills its line (a heading such as `#### 1. Cost` does not), else the first."""
    matches = list(_HASHES.finditer(response))
    filled = [match for match in matches if not re.search(r"\w{3}", match["rest"])]
    chosen = (filled or matches)[:1]
    return chosen[0]["value"].rstrip(".,") if chosen else None


def _boxed_or_free(response: str, label: str) -> tuple[list[str], str]:
    found = boxes(response)
    if found.cut:
        return [], "the last \\boxed is cut off"
    if found.answers:
        return _by_label(found.answers[-1], found.joined, label), "box"
    return _free_text(response, label), "free text"


def _by_label(last: str, joined: str | None, label: str) -> list[str]:
    """The last box; boxes side by side only for a label with several values."""
    if joined is None or joined == last:
        return [last]
    several = any(
        re.search(r",|\\text\s*\{\s*(?:and|or)\s*\}|\\pm| and | or ", answer) for answer in label_answers(label)
    )
    return [joined, last] if several else [last]


def _free_text(response: str, label: str) -> list[str]:
    answer = after_thinking(response)
    hashed = _after_hashes(answer)
    if hashed is not None:
        return [hashed]
    numeric = all(last_number(value) for value in label_answers(label))
    phrase = after_phrase(answer)
    if phrase is not None:
        said = _said(phrase, numeric)
        if said is not None:
            return [said]
    guess = (last_number(answer) if numeric else None) or last_math(answer) or last_number(answer)
    return [guess] if guess else []


def _said(phrase: str, numeric: bool) -> str | None:
    """The answer in what follows "the answer is"."""
    formula = last_math(phrase)
    if formula is not None:
        return formula.rpartition("=")[2] if numeric else formula
    sentence = first_sentence(phrase).strip()
    if numeric:
        return last_number(sentence.rpartition("=")[2]) or last_number(sentence)
    return sentence or None


def _verdict(candidates: list[str], label: str, source: str) -> Reward:
    if not candidates:
        return Reward(0.0, False, f"no answer found ({source})")
    answers = label_answers(label)
    for candidate in candidates:
        if any(equivalent(candidate, answer) for answer in answers):
            return Reward(
                1.0, True, f"{source}: {candidate[:_SHOWN_CHARACTERS]!r} equals {answers[0][:_SHOWN_CHARACTERS]!r}"
            )
    shown = candidates[0][:_SHOWN_CHARACTERS]
    return Reward(0.0, False, f"{source}: {shown!r} is not {answers[0][:_SHOWN_CHARACTERS]!r}")
