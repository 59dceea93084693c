"""Answers in words, compared as in question answering."""

import re
import string
from collections import Counter
from typing import Annotated, Literal

from pydantic import Field

from rewards.answers.extract import after_phrase, after_thinking, boxes, label_answers
from rlpipe.shared.sample import Reward

Where = Literal["all", "answer", "boxed"]
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(response: str, label: str, where: Where = "all", threshold: Annotated[float, Field(gt=0, le=1)] = 1.0) -> Reward:
    """Word F1 between the answer and the best of the label's alternatives (a JSON list, or one text).

    The measure of SQuAD (arXiv 1606.05250): lower case, without punctuation and articles, words as multisets.
    `where`: the whole response after any `</think>`, what follows "answer:" or "answer is", or the last box. `correct`
    is F1 >= `threshold`.
    """
    answer = _answer(response, where)
    if answer is None:
        return Reward(0.0, False, f"no answer ({where})", {"format": 0.0})
    best = max(_f1(normalize(answer), normalize(expected)) for expected in label_answers(label))
    return Reward(best, best >= threshold, f"F1 {best:.3f}", {"format": 1.0})


def exact_match(response: str, label: str, where: Where = "all") -> Reward:
    """1 if the answer equals one of the label's alternatives after SQuAD's normalization, else 0; otherwise as `f1`."""
    answer = _answer(response, where)
    if answer is None:
        return Reward(0.0, False, f"no answer ({where})", {"format": 0.0})
    correct = any(normalize(answer) == normalize(expected) for expected in label_answers(label))
    return Reward(float(correct), correct, "equal" if correct else "not equal", {"format": 1.0})


def normalize(text: str) -> list[str]:
    """SQuAD's words of `text`: lower case, no punctuation, no articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _answer(response: str, where: Where) -> str | None:
    text = after_thinking(response)
    if where == "all":
        return text
    if where == "answer":
        return after_phrase(text)
    found = boxes(text).answers
    return found[-1] if found else None


def _f1(answer: list[str], expected: list[str]) -> float:
    if not answer or not expected:
        return float(answer == expected)
    common = sum((Counter(answer) & Counter(expected)).values())
    return 2 * common / (len(answer) + len(expected))
