"""Which of the requests that wait with one prompt are held back until another one has computed it."""

from array import array
from types import SimpleNamespace

from rollout.sglang_patches.prompts_once import held_back


def group(name: str, samples: int, prompt_tokens: int = 100, extra_key: str | None = None, written: int = 0) -> list:
    """Requests of one prompt of SGLang's kind, so far as they are looked at."""
    prompt, output = array("q", [ord(name)] * prompt_tokens), array("q", range(written))
    return [
        SimpleNamespace(rid=f"{name}{index}", extra_key=extra_key, origin_input_ids=prompt, output_ids=output)
        for index in range(samples)
    ]


def held(*groups: list, cached: int = 0) -> set[str]:
    return held_back([request for group in groups for request in group], lambda request: cached)


def test_one_of_each_prompt_goes_first():
    assert held(group("a", 4), group("b", 1), group("c", 2)) == {"a1", "a2", "a3", "c1"}


def test_a_prompt_in_the_cache_holds_nothing_up():
    assert held(group("a", 9), cached=99) == set()  # all but the last token, which is always computed
    assert held(group("a", 9), cached=60) == {f"a{index}" for index in range(1, 9)}


def test_a_pass_has_to_be_worth_it_for_all_prompts_together():
    assert held(group("a", 2)) == set()
    assert len(held(*(group(name, 2) for name in "abc"))) == 3


def test_what_was_written_and_the_adapter_belong_to_the_prompt():
    assert held(group("a", 1), group("a", 1, extra_key="adapter"), group("a", 1, written=3), group("b", 1)) == set()
    assert held(group("a", 4, written=3)) == {"a1", "a2", "a3"}
