"""Special tokens in rows, in conversations that are written side by side."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rlpipe.data.special_text import SpecialText
from rlpipe.prepare.tokenizer import byte_tokenizer


def test_conversations_beside_each_other_get_the_tokens_that_each_gets_alone():
    """All share the run's tokenizer, which holds whether it takes special tokens for such until the next call."""
    tokenizer = byte_tokenizer()
    special, end = SpecialText(tokenizer), tokenizer.eos_token
    hidden = f"{special.prepared(f'one {end} two', 'a row')} and {end}"
    asked = [
        partial(special.token_ids, hidden),
        partial(special.token_ids, f"what the template wrote {end}"),
        lambda: tokenizer(f"what a prompt has {end}", add_special_tokens=False)["input_ids"],
    ]
    alone = [ask() for ask in asked]
    assert [ids.count(tokenizer.eos_token_id) for ids in alone] == [1, 1, 1]

    def many(number: int) -> bool:
        return all(asked[number % 3]() == alone[number % 3] for _ in range(400))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(many, range(6)))
