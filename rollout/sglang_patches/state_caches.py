"""SGLang's cache of recurrent states also for the text forms of Qwen3.5.

A cached prefix of a hybrid model needs the recurrent states at its end. Where SGLang overlaps scheduling with
computing, a request's own states have run ahead of its tokens by then, so it keeps copies in buffers of their own; but
it knows this of architectures by name, and of Qwen3.5 knows the vision-language forms alone. The text forms would be
handed states that are one token too far.
"""

from rlpipe.shared.replaced_parts import replaces

replaces(
    "sglang.srt.arg_groups.overrides:_MAMBA_RADIX_CACHE_ARCHS",
    "sglang.srt.arg_groups.overrides:_MAMBA_EXTRA_BUFFER_ARCHS",
    why="prefixes of text-only Qwen3.5 get states that are one token too far",
    drop_when="SGLang names Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM there",
)

_TEXT_FORMS = frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"})


def install() -> None:
    """Call in every process that reads SGLang's arguments, before it does."""
    from sglang.srt.arg_groups import overrides

    overrides._MAMBA_RADIX_CACHE_ARCHS |= _TEXT_FORMS
    overrides._MAMBA_EXTRA_BUFFER_ARCHS |= _TEXT_FORMS
