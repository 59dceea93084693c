"""The checks of IFEval (arXiv 2311.07911), one small function per instruction id.

Each takes the response and the keyword arguments of the data set. Words are what regular expressions call words and
sentences end at `.`, `!` or `?`, where the reference uses nltk. Languages are told by the library of the reference,
which lets a text without letters pass.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from rlpipe.shared.replaced_parts import relies_on

relies_on(
    "langdetect.detector_factory:DetectorFactory.seed",
    why="its detector draws random numbers; the same response must get the same verdict",
    drop_when="it takes a seed for each call",
)

_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _compare(count: int, relation: str, wanted: int) -> bool:
    if relation == "at least":
        return count >= wanted
    if relation == "less than":
        return count < wanted
    raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _has_keywords(text: str, keywords: list[str]) -> bool:
    return all(_count(re.escape(word), text) for word in keywords)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return _compare(_count(re.escape(keyword), text), relation, frequency)


def _lacks_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(_count(rf"\b{re.escape(word)}\b", text) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    sentences = [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", text.strip()) if part.strip()]
    return _compare(len(sentences), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[bool(not parts[0]) : len(parts) - bool(not parts[-1])]
    return all(inner) and len(inner) == num_paragraphs


def _word_count(text: str, num_words: int, relation: str) -> bool:
    return _compare(len(_words(text)), relation, num_words)


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    return (
        re.split(r"[.,?!'\"]", paragraphs[nth_paragraph - 1].split()[0].lstrip("'\""))[0].lower() == first_word.lower()
    )


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = [re.escape(letter) for letter in postscript_marker.rstrip(".").split(".")]
    pattern = r"\.\s?".join(letters) if postscript_marker in ("P.S.", "P.P.S") else re.escape(postscript_marker)
    return re.search(rf"^\s*{pattern}.*$", text, re.IGNORECASE | re.MULTILINE) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    starred = re.findall(r"^\s*\*[^*].*$", text, re.MULTILINE)
    return len(starred) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(option in text for option in _CONSTRAINED)


def _highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    single = re.findall(r"(?<!\*)\*([^\n*]+)\*(?!\*)", text)
    return sum(bool(part.strip()) for part in [*double, *single]) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) >= num_sections


def _is_json(text: str) -> bool:
    bare = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    inner = parts[bool(not parts[0]) : len(parts) - bool(not parts[-1])]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    return len(text.strip()) > 1 and text.strip().startswith('"') and text.strip().endswith('"')


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in _words(text)), capital_relation, capital_frequency)


def _is_language(text: str, language: str) -> bool:
    return language_of(text) in (language, None)


CHECKS: dict[str, Callable[..., Any]] = {
    "keywords:existence": _has_keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _lacks_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _word_count,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _has_title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends_with,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper() and _is_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _is_language(text, "en"),
    "language:response_language": _is_language,
    "punctuation:no_comma": lambda text: "," not in text,
}


def language_of(text: str) -> str | None:
    """The language of `text` by the library that IFEval uses, whose random seed is global.

    Its code, for instance "en" or "zh-cn", the same in every call; None for a text without letters.
    """
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return str(detect(text))
    except LangDetectException:
        return None
