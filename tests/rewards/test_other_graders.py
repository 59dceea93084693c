"""Choices, words, formats, penalties and sums of graders."""

import json

import pytest

import rewards
from rewards.ifeval_checks import CHECKS
from rlpipe.shared.errors import ConfigError


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("... so the answer is (B).", "B"),
        ("Answer: B", "B"),
        ("**Answer: B**", "B"),
        ("**Answer:** B", "B"),
        ("Answer: $B$", "B"),
        (r"The correct answer is $\boxed{B}$", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B)}", "B"),
        ("Answer: A. No, wait.\nAnswer: B", "B"),
        ("Option A is wrong.\n\nB", "B"),
        ("(B)", "B"),
        ("The answer is option B.", "B"),
        ("The correct choice is (B): rain", "B"),
        ("The answer is B because A is wrong.", "B"),
        ("<think>Answer: A</think>Answer: B", "B"),
        ("A good question.", None),
        ("The answer is Boron.", None),
        ("", None),
    ],
)
def test_multiple_choice_finds_the_letter(response: str, letter: str | None) -> None:
    right, wrong = (rewards.grade("multiple_choice", response, label) for label in ("B", "(A)"))
    assert (right.correct, wrong.correct) == (letter == "B", False)
    assert right.components == {"format": float(letter is not None)}


def test_multiple_choice_with_a_label_in_words() -> None:
    metadata = {"choices": ["red", "green", "blue"]}
    assert rewards.grade("multiple_choice", "Answer: C", "blue", metadata=metadata).correct
    assert rewards.grade("multiple_choice", "Answer: C", "blue", choices=["blue", "red"]).correct is False
    with pytest.raises(ValueError, match="pink"):
        rewards.grade("multiple_choice", "Answer: C", "pink", metadata=metadata)


@pytest.mark.parametrize(
    ("response", "label", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0),
        ("the tall eiffel tower", "Eiffel Tower", 0.8),
        ("Paris", '["London", "paris"]', 1.0),
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("a b b", "b b c", 0.8),
    ],
)
def test_f1(response: str, label: str, f1: float) -> None:
    assert rewards.grade("f1", response, label).score == pytest.approx(f1)


def test_words_are_taken_from_where_they_are_wanted() -> None:
    response = r"London? The answer is: Paris." + "\n" + r"\boxed{Rome}"
    assert rewards.grade("exact_match", response, "Paris", where="answer").correct
    assert rewards.grade("exact_match", response, "Rome", where="boxed").correct
    assert not rewards.grade("exact_match", response, "Rome").correct
    for name in ("exact_match", "f1"):
        without = rewards.grade(name, "no box", "no box", where="boxed")
        assert not without.correct and without.components == {"format": 0.0}


@pytest.mark.parametrize(("tokens", "score"), [(10, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)])
def test_length_falls_linearly_over_the_buffer(tokens: int, score: float) -> None:
    options = {"maximum_tokens": 100, "buffer_tokens": 20, "response_tokens": tokens}
    assert rewards.grade("length", "text", "", **options).score == pytest.approx(score)


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert rewards.grade("repetition", "a b c d e f", "", ngram_words=2).score == 0.0
    # a b | b a | a b | b a | a b: two different ones of five.
    assert rewards.grade("repetition", "a b a b a b", "", ngram_words=2).score == pytest.approx(-0.6)
    assert rewards.grade("repetition", "short", "", ngram_words=20).score == 0.0


IFEVAL = [
    ("keywords:existence", {"keywords": ["red", "blue"]}, "Red and blue.", "Red only."),
    ("keywords:frequency", {"keyword": "red", "frequency": 2, "relation": "at least"}, "red red", "red"),
    ("keywords:forbidden_words", {"forbidden_words": ["red"]}, "Reddish.", "Red."),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": "less than"}, "a b", "a a"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "One."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "two"},
        "One.\n\nTwo, yes.",
        "One.\n\nOne.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hi\nP.S. bye", "Hi"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "Yes."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1 a",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Title>> text", "Title"),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:two_responses", {}, "****** one ****** two ******", "one ****** two ****** three"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Say it. It.", "It."),
    ("startend:end_checker", {"end_phrase": "The end."}, "So. The end.", "The end. So."),
    ("startend:quotation", {}, '"quoted"', "quoted"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "ONE TWO three",
        "ONE two",
    ),
    ("change_case:english_capital", {}, "ALL OF IT.", "Not all."),
    ("change_case:english_capital", {}, "HERE IS ALL OF IT.", "DAS IST LEIDER NICHT ENGLISCH."),
    ("language:response_language", {"language": "de"}, "Das ist ein deutscher Satz.", "This is an English sentence."),
    ("language:response_language", {"language": "hi"}, "यह वाक्य हिंदी में है।", "यह वाक्य मराठी भाषेत आहे."),
    ("change_case:english_lowercase", {}, "all of it.", "Not all."),
    ("punctuation:no_comma", {}, "none", "a, b"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), IFEVAL, ids=[case[0] for case in IFEVAL])
def test_ifeval_checks(name: str, arguments: dict, good: str, bad: str) -> None:
    label = json.dumps({"instruction_id_list": [name], "kwargs": [{**arguments, "of_another_instruction": None}]})
    assert rewards.grade("ifeval", good, label).score == 1.0
    assert rewards.grade("ifeval", bad, label).score == 0.0
    assert rewards.grade("ifeval", "", label).score == 0.0


def test_every_ifeval_check_has_a_case() -> None:
    assert {case[0] for case in IFEVAL} == set(CHECKS)


def test_ifeval_from_columns_with_share_and_lenience() -> None:
    metadata = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {}],
    }
    strict = rewards.grade("ifeval", 'Sure, here:\n"quoted"', "", score="share", metadata=metadata)
    assert (strict.score, strict.correct) == (0.0, False)
    loose = rewards.grade("ifeval", 'Sure, here:\n"quoted"', "", loose=True, metadata=metadata)
    assert (loose.score, loose.correct) == (1.0, True)
    with pytest.raises(ValueError, match="language:unheard_of"):
        rewards.grade("ifeval", "x", '{"instruction_id_list": ["language:unheard_of"], "kwargs": [{}]}')


def test_ifeval_takes_the_prompt_that_a_row_does_not_repeat() -> None:
    metadata = {"instruction_id_list": ["combination:repeat_prompt", "punctuation:no_comma"], "kwargs": [{}, {}]}
    for response, score in (("Say it. Yes, it.", 0.5), ("Say it. It.", 1.0), ("Yes, it.", 0.0)):
        reward = rewards.grade("ifeval", response, "", prompt="Say it.", score="share", metadata=metadata)
        assert (reward.score, reward.correct) == (score, score == 1.0)


def test_weighted_sums_scores_and_keeps_the_parts() -> None:
    parts = [
        {"name": "math"},
        {"name": "length", "weight": 0.5, "options": {"maximum_tokens": 100, "buffer_tokens": 20}},
    ]
    facts = {"response_tokens": 90}
    reward = rewards.grade("weighted", r"\boxed{5}", "5", parts=parts, facts=facts)
    assert (reward.score, reward.correct) == (0.75, True)
    assert reward.components == {"format": 1.0, "math": 1.0, "length": -0.5}


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [{"name": "math"}, {"name": "math"}],
        [{"name": "mth"}],
        [{"weight": 1}],
        [{"name": "math", "wieght": 1}],
        [{"name": "length", "options": {}}],
    ],
)
def test_weighted_parts_are_checked_at_start(parts: list[dict]) -> None:
    with pytest.raises(ConfigError):
        rewards.check_grader("weighted", {"parts": parts})


@pytest.mark.parametrize(("threshold", "correct"), [(0.5, True), (0.8, True), (0.9, False)])
def test_f1_is_correct_from_its_threshold_on(threshold: float, correct: bool) -> None:
    reward = rewards.grade("f1", "the tall eiffel tower", "Eiffel Tower", threshold=threshold)
    assert (reward.score, reward.correct) == (0.8, correct)
    assert rewards.grade("f1", "The Eiffel Tower!", "eiffel tower").correct


@pytest.mark.parametrize(
    ("name", "arguments", "more"),
    [
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [city] [date]"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b** and *c*"),
        ("detectable_format:multiple_sections", {"section_spliter": "S", "num_sections": 2}, "S 1 a S 2 b S 3 c"),
    ],
)
def test_more_than_the_least_number_is_right_too(name: str, arguments: dict, more: str) -> None:
    label = json.dumps({"instruction_id_list": [name], "kwargs": [arguments]})
    assert rewards.grade("ifeval", more, label).score == 1.0


def test_a_label_in_words_that_begins_like_a_letter_is_one_of_the_choices() -> None:
    choices = ["E. coli", "C. elegans", "yeast"]
    assert rewards.grade("multiple_choice", "Answer: B", "C. elegans", choices=choices).correct


def test_code_of_the_thinking_is_no_answer() -> None:
    thinking = "<think>\n```python\nx = 1\n```\n</think>I cannot."
    assert rewards.grade("code", thinking, "assert x == 1").components == {"format": 0.0}
