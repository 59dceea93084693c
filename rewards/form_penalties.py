"""Penalties on the form of a response. Their scores are at most 0; they are used as parts of `weighted`."""

from pydantic import NonNegativeFloat, PositiveInt

from rlpipe.shared.sample import Reward


def length(
    response: str, label: str, maximum_tokens: PositiveInt, buffer_tokens: PositiveInt, response_tokens: int
) -> Reward:
    """0 up to `maximum_tokens - buffer_tokens`, then falling linearly to -1 at `maximum_tokens` and beyond.

    Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13). `response_tokens` is a fact of the sample.
    """
    over = response_tokens - (maximum_tokens - buffer_tokens)
    score = -min(max(over / buffer_tokens, 0.0), 1.0)
    return Reward(score, None, f"{response_tokens} tokens of at most {maximum_tokens}")


def repetition(
    response: str, label: str, ngram_words: PositiveInt = 20, largest_penalty: NonNegativeFloat = 1.0
) -> Reward:
    """Minus `largest_penalty` times the share of word n-grams that occurred before in the response.

    The n-gram penalty of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373), per response.
    """
    words = response.lower().split()
    count = len(words) - ngram_words + 1
    if count <= 0:
        return Reward(0.0, None, f"shorter than {ngram_words} words")
    distinct = len(set(zip(*(words[start:] for start in range(ngram_words)), strict=False)))
    share = 1 - distinct / count
    return Reward(-share * largest_penalty, None, f"{share:.1%} of the {ngram_words}-grams are repeated")
