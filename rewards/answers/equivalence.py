"""Whether two answers are the same mathematics.

Cheap and exact first: equal text, exact numbers, words, options, number bases. What is left goes to math-verify, which
parses LaTeX and compares with sympy. The rules on top of it: a decimal equals a fraction only from six correct places
on (0.33 is not 1/3, 0.333333 is), a percentage equals the number with and without its sign (50% is 50 and 0.5, as in
MATH), units are ignored unless both answers have different known ones, and a number base may be missing but not differ.
"""

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Eq, Expr, FiniteSet, Float, MatrixBase, UnevaluatedExpr, Union
from sympy.core.relational import Relational

from rewards.answers.plain import (
    Number,
    based,
    choice_letter,
    number,
    only_number,
    spread_plus_minus,
    tidy,
    without_text,
    words,
)

LONGEST_ANSWER_CHARACTERS = 1000
DEEPEST_NESTING = 50
_ENOUGH_PLACES = 6
_TOLERANCE = 1e-6
# Nothing but LaTeX: with plain expressions as well, any number inside an answer that does not parse would be taken.
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)
_OPERATION = re.compile(r"[-+*/^]")
_VARIABLE = re.compile(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_ASSIGNMENT = re.compile(r"(?P<name>\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\(\w\))?)\s*(?:=|\\in|\\approx)\s*(?P<value>[^=]+)")

# math-verify warns once per process that its own time limit (SIGALRM, main thread only) is off. The time limit here is
# the pool's.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def equivalent(answer: str, label: str) -> bool:
    """Whether `answer` is mathematically the same as `label`. Not symmetric: the label's form counts."""
    if len(answer) > LONGEST_ANSWER_CHARACTERS:
        return False
    answer, label = tidy(answer), tidy(label)
    if not answer or not label:
        return False
    if _same_text(without_text(answer), without_text(label)):
        return True
    if r"\approx" in answer:
        return any(equivalent(part, label) for part in answer.split(r"\approx"))
    answer, label = _drop_names(answer, label)
    decided = _decided_by_form(answer, label)
    return _decided_by_math_verify(answer, label) if decided is None else decided


def _same_text(answer: str, label: str) -> bool:
    """Equal, in any case where letters are words (7 PM) and not variables (A, a)."""
    return answer == label or (answer.casefold() == label.casefold() and not _VARIABLE.search(label))


def _drop_names(answer: str, label: str) -> tuple[str, str]:
    """Without `x =` where the other side has no name or the same."""
    named_answer, named_label = _ASSIGNMENT.fullmatch(answer), _ASSIGNMENT.fullmatch(label)
    if named_answer and (named_label is None and "=" not in label):
        return named_answer["value"].strip(), label
    if named_label and (named_answer is None and "=" not in answer):
        return answer, named_label["value"].strip()
    if named_answer and named_label and named_answer["name"] == named_label["name"]:
        return named_answer["value"].strip(), named_label["value"].strip()
    return answer, label


def _decided_by_form(answer: str, label: str) -> bool | None:
    """The verdict where the form of both sides settles it, else None."""
    left, right = number(answer), number(label)
    if left is None and right is not None and (among_words := only_number(answer)) is not None:
        left = number(among_words)
    if left is not None and right is not None:
        return numbers_equal(left, right)
    if "=" not in answer and _OPERATION.search(label.partition("=")[0]) and "=" in label:
        return False  # `5` is no answer where `x + y = 5` is wanted, though math-verify takes the right-hand side
    letter = choice_letter(label) if len(label) < 12 and words(label) is None else None
    if letter is not None and choice_letter(answer) is not None:
        return choice_letter(answer) == letter
    text = words(label)
    if text is not None and words(answer) is not None:
        return words(answer) == text
    with_base, expected = based(answer), based(label)
    if with_base and expected:
        return with_base == expected
    if with_base or expected:
        digits = (with_base or expected or ("", 0))[0]
        return digits == (label if with_base else answer).upper().lstrip("0")
    return None


def numbers_equal(left: Number, right: Number) -> bool:
    """Exact equality, with the conventions for percentages, decimals and units of this module."""
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.percent != right.percent:
        percent, plain = (left, right) if left.percent else (right, left)
        return percent.value == plain.value or percent.value / 100 == plain.value
    return left.value == right.value or _rounds_to(left, right) or _rounds_to(right, left)


def _rounds_to(exact: Number, decimal: Number) -> bool:
    if exact.places is not None or decimal.places is None or decimal.places < _ENOUGH_PLACES:
        return False
    return abs(exact.value - decimal.value) <= Fraction(1, 2 * 10**decimal.places)


def _decided_by_math_verify(answer: str, label: str) -> bool:
    if _too_deep(answer):
        return False
    expected, given = _parsed(label), _parsed(answer)
    if not expected or not given or _clearly_different(given[0], expected[0]):
        return False
    return bool(verify(expected, given, allow_set_relation_comp=True, timeout_seconds=None))


def _clearly_different(left: Basic | MatrixBase | str, right: Basic | MatrixBase | str) -> bool:
    """Whether two expressions in the same variables differ at one point: spares most wrong answers the simplifier."""
    if not (isinstance(left, Expr) and isinstance(right, Expr)) or left.free_symbols != right.free_symbols:
        return False
    if left.has(UnevaluatedExpr) or right.has(UnevaluatedExpr):  # a percentage, which may equal two numbers
        return False
    point = {name: Float(0.37 + 0.61 * index) for index, name in enumerate(sorted(left.free_symbols, key=str))}
    try:
        first, second = complex(left.evalf(subs=point)), complex(right.evalf(subs=point))
    except Exception:  # sympy raises anything for what it cannot evaluate; then this decides nothing
        return False
    # Not so where either is nan or infinite: such a comparison is false.
    return abs(first - second) > _TOLERANCE * max(1.0, abs(first), abs(second)) and math.isfinite(abs(first - second))


def _too_deep(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest > DEEPEST_NESTING


# A group's samples share their label.
@lru_cache(maxsize=4096)
def _parsed(text: str) -> list[Basic | MatrixBase | str]:
    found = parse(rf"\boxed{{{spread_plus_minus(text)}}}", _EXTRACTION, parsing_timeout=None)
    return [_joined_inequalities(found[0]), *found[1:]] if found else []


def _joined_inequalities(value: Basic | MatrixBase | str) -> Basic | MatrixBase | str:
    """`x < 1 or x > 2`, which is parsed as a set of two inequalities, as the numbers that satisfy one of them."""
    parts = value.args if isinstance(value, FiniteSet) else ()
    if len(parts) > 1 and all(isinstance(part, Relational) and not isinstance(part, Eq) for part in parts):
        names = set().union(*(part.free_symbols for part in parts))
        if len(names) == 1:
            try:
                return Union(*(part.as_set() for part in parts))
            except NotImplementedError:  # sympy cannot solve one of them
                return value
    return value
