"""Where the answer is looked for, and what each convention gives for it."""

import json
import random
from pathlib import Path

import pytest

import rewards
from rewards.answers.extract import boxes

GSM8K = Path(__file__).parents[1] / "gsm8k_rows"

CORRECT = [
    (r"Thus the answer is $\boxed{42}$.", "42"),
    (r"First \boxed{7}. Wait, that is wrong. So \boxed{42}", "42"),
    (r"The final answer is: $\boxed{42}$. I hope it is correct.", "42"),
    ("Final Answer: The final answer is $42$. I hope it is correct.", "42"),
    (r"\boxed 42", "42"),
    (r"\fbox{42}", "42"),
    (r"\[ \boxed{ \dfrac{1}{2} } \]", r"\frac12"),
    (r"\boxed{\text{A}}", "A"),
    (r"The roots are \boxed{1} and \boxed{2}.", "1,2"),
    (r"$x=\boxed{1}$ or $x=\boxed{-3}$", "-3, 1"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    (r"so $\boxed{x = 5}$ dollars", "5"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"\boxed{\text{Janet makes } \$18}", "18"),
    ("<think>maybe \\boxed{1}</think> The answer is \\boxed{2}.", "2"),
    ("She makes 9 * 2 = $18 every day.", "18"),
    ("The answer is 18 dollars.", "18"),
    ("The answer is: 1,234.", "1234"),
    ("Therefore, the answer is 5 + 3 = 8.", "8"),
    ("**Answer:** 18", "18"),
    ("The answer is 9*5=45 apples, and 3 pears are left.", "45"),
    ("The answer is 45 for 3 of them.", "45"),
    ("**Answer**: $18$", "18"),
    ("### Final Answer\n\n18", "18"),
    ("# Answer\n\n\\frac{1}{2}", r"\frac{1}{2}"),
    ("**Final Answer**\n\n\\[ \\frac{1}{2} \\]", r"\frac{1}{2}"),
    ("The answer is $\\frac{1}{2}$, since half of them are red.", "1/2"),
    ("So the train needs 5km.", "5"),
    ("so it costs $1,200.50.", "1200.5"),
    ("That is 3/4 of it.", "0.75"),
    ("On the 2nd day he ate 7 of them", "7"),
    ("so x = -5.", "-5"),
    ("2 + 2 = 4\n#### 4", "4"),
    ("The answer is even.", "even"),
    ("The answer to the problem is 12.", "12"),
    (r"We get $y = 3x + 2$.", "3x+2"),
    (r"so $\boxed{3}", "3"),
    (r"The roots are \boxed{1, 2}.", "2, 1"),
    (r"The roots are \boxed{1} and \boxed{2}.", '["5", "1,2"]'),
    ("The answer is even.", '["7", "even"]'),
    ("The answer is $5 + 3 = 8$.", "8"),
]

WRONG = [
    (r"\boxed{42} and then \boxed{41}", "42"),
    (r"The roots are \boxed{1} and \boxed{2}.", "2,3"),
    (r"so the answer is \boxed{4", "42"),
    (r"so the answer is \boxed{42", "42"),
    (r"first \boxed{42}, no: \boxed{4", "42"),
    (r"\boxed{0.33}", r"\frac{1}{3}"),
    (r"\boxed{}", "0"),
    (r"42 is it \boxed{B}", "42"),
    ("", "0"),
    ("I do not know.", "5"),
    ("There are 3 cats and 4 dogs.", "3"),
    ("The answer is 5. Or was it?", "6"),
    (r"\boxed{1, 2}", "1"),
    (r"\boxed{5 or 6}", "5"),
    (r"\boxed{1, 3}", "1, 2"),
]


@pytest.mark.parametrize(("response", "label"), CORRECT)
def test_math_finds_the_answer(response: str, label: str) -> None:
    reward = rewards.grade("math", response, label)
    assert (reward.score, reward.correct) == (1.0, True), reward.reason


@pytest.mark.parametrize(("response", "label"), WRONG)
def test_math_refuses(response: str, label: str) -> None:
    reward = rewards.grade("math", response, label)
    assert (reward.score, reward.correct) == (0.0, False), reward.reason


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>\boxed{1}</think>\boxed{5}", 1.0),
        (r"reasoning ###Response so \boxed{5}", 1.0),
        (r"\boxed{5}", 0.0),
        ("<think></think> The answer is 5.", 0.0),
        (r"<think>\boxed{5}</think> done", 0.0),
        (r"<think></think>\boxed{6}", 0.0),
    ],
)
def test_deepscaler(response: str, score: float) -> None:
    assert rewards.grade("deepscaler", response, "5").score == score


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (r"\boxed{5}", "no answer found: no </think>"),
        ("<think></think> 5", r"no answer found: no closed \boxed after </think>"),
        (r"<think></think>\boxed{5", r"no answer found: no closed \boxed after </think>"),
        (r"<think></think>\boxed{6}", "box: '6' is not '5'"),
        (r"<think></think>\boxed{5}", "box: '5' equals '5'"),
    ],
)
def test_deepscaler_says_what_it_missed(response: str, said: str) -> None:
    assert rewards.grade("deepscaler", response, "5").reason == said


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("...\nAnswer: 34", "34", 1.0),
        ("...\nAnswer: $34$.", "34", 1.0),
        ("...\nAnswer: \\boxed{34}", "34", 1.0),
        ("...\nanswer : 034", "34", 1.0),
        ("Answer: 34\nAnswer: 35", "34", -1.0),
        ("Answer: 35", '["34", "35"]', 1.0),
        ("The result is 34", "34", -1.0),
        ("\\boxed{34}", "34", -1.0),
        ("Answer: 34" + "x" * 300, "34", -1.0),
        ("Answer: 34\n" + "x" * 289, "34", 1.0),
        ("Answer: 34\n" + "x" * 290, "34", -1.0),
    ],
)
def test_dapo(response: str, label: str, score: float) -> None:
    reward = rewards.grade("dapo", response, label)
    assert (reward.score, reward.correct) == (score, score > 0), reward.reason


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("1 + 1 = <<1+1=2>>2\n#### 2", "2", 1.0),
        ("#### $1,234.00", "1234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("so\n#### 18 eggs.\n", "18", 1.0),
        ("so\n#### \\frac{1}{2}", "0.5", 1.0),
        ("so it is 5\n#### none", "5", 0.0),
        ("#### 1. Cost\nIt costs 3.\n#### 2. Total\n#### 7", "7", 1.0),
        ("#### 7\n\nQuestion: another one\n#### 9", "7", 1.0),
        ("#### 8", "7", 0.0),
        ("The answer is 7.", "It is 3+4\n#### 7", 1.0),
        (r"\boxed{7}", "7", 1.0),
    ],
)
def test_gsm8k(response: str, label: str, score: float) -> None:
    assert rewards.grade("gsm8k", response, label).score == score


@pytest.mark.parametrize(("response", "found"), [("is 7", "7"), ("\x0c-7!", "-7"), ("The answer is\n 7 ", "7")])
def test_a_number_in_free_text_is_told_without_the_space_around_it(response: str, found: str) -> None:
    assert rewards.grade("gsm8k", response, "8").reason == f"free text: {found!r} is not '8'"


def test_gsm8k_strict_wants_the_hashes() -> None:
    assert rewards.grade("gsm8k", "The answer is 7.", "7", strict=True).score == 0.0
    assert rewards.grade("gsm8k", "#### 7", "7", strict=True).score == 1.0


@pytest.mark.parametrize(
    ("grader", "response", "kept"),
    [
        ("math", r"\boxed{1}", 1.0),
        ("math", "It is 2.", 0.0),
        ("math", r"\boxed{2", 0.0),
        ("gsm8k", "#### 3", 1.0),
        ("gsm8k", "It is 2.", 0.0),
        ("gsm8k", r"\boxed{2}", 0.0),
        ("deepscaler", r"<think></think>\boxed{1}", 1.0),
        ("deepscaler", r"\boxed{2}", 0.0),
        ("dapo", "Answer: 1", 1.0),
        ("dapo", "It is 2.", 0.0),
    ],
)
def test_format_component_tells_whether_the_convention_was_kept(grader: str, response: str, kept: float) -> None:
    assert rewards.grade(grader, response, "2").components == {"format": kept}


def test_a_strict_grader_says_that_hashes_are_missing() -> None:
    reward = rewards.grade("gsm8k", "It is 2.", "2", strict=True)
    assert (reward.reason, reward.components) == ("no answer found: no '#### number'", {"format": 0.0})


@pytest.mark.parametrize(
    ("response", "label", "said"),
    [
        (r"\boxed{1, 3}", "1, 2", "box: '1, 3' is not '1, 2'"),
        (r"\boxed{1} and \boxed{3}", "1, 2", "box: '1, 3' is not '1, 2'"),
        (r"First \boxed{1}. That is wrong, so \boxed{2}", "1, 2", "box: '2' is not '1, 2'"),
        ("The answer is $5+3=8$.", "9", "free text: '8' is not '9'"),
        ("The answer is $y = 3x$.", "y = 2x", "free text: 'y = 3x' is not 'y = 2x'"),
    ],
)
def test_a_wrong_answer_is_told_as_it_was_read(response: str, label: str, said: str) -> None:
    assert rewards.grade("math", response, label).reason == said


def test_eighty_characters_of_an_answer_are_told() -> None:
    response, label = "x" * 81, "y" * 81
    reason = rewards.grade("math", rf"\boxed{{{response}}}", label).reason
    assert reason == f"box: {response[:80]!r} is not {label[:80]!r}"


def test_boxes_keep_their_order_and_nest() -> None:
    found = boxes(r"\boxed{a} text \boxed{b}, \boxed{\boxed{c}} \boxed{d \text{ or \} } } {")
    assert found.answers == ("a", "b", r"\boxed{c}", r"d \text{ or \} }")
    assert found.joined == r"b, \boxed{c}, d \text{ or \} }"
    assert not found.cut


@pytest.mark.parametrize("style", ["#### {}", "The answer is ${}.", "so $\\boxed{{{}}}$.", "**{}** is what we get"])
@pytest.mark.parametrize("grader", ["gsm8k", "math"])
def test_gold_answers_are_right_and_perturbed_ones_wrong(grader: str, style: str) -> None:
    generator = random.Random(0)
    for line in (GSM8K / "train.jsonl").read_text().splitlines():
        solution, _, gold = json.loads(line)["answer"].partition("#### ")
        other = str(int(gold.replace(",", "")) + generator.choice([-1, 1, 10, 1000]))
        right = rewards.grade(grader, f"{solution}\n{style.format(gold)}", gold)
        wrong = rewards.grade(grader, f"{solution}\n{style.format(other)}", gold)
        assert right.correct, (line, right)
        assert wrong.correct is False, (line, wrong)
