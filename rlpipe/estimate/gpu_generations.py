"""What runs on which generation of NVIDIA GPUs, by compute capability: one table for the doctor and a run's header.

The actor's kernels are chosen in `actor/layers/gdn_backend.py` and `actor/layers/causal_attention.py`, an engine's by
SGLang 0.5.17 (`ServerArgs._get_default_attn_backend`); a test holds the first against this table.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

Capability = tuple[int, int]


@dataclass(frozen=True)
class Generation:
    """GPUs from `first` up to `last`. Names as the settings have them.

    gdn: kernels of Gated DeltaNet layers that can run, the one that `auto` takes first. engine_attention: SGLang's
    choice for softmax attention. fp8: whether matrix products take 8-bit floats.
    """

    name: str
    first: Capability
    last: Capability
    attention: str
    gdn: tuple[str, ...]
    engine_attention: str
    fp8: bool


LONG_SEQUENCE_TOKENS = 3000
"""From about which on cuDNN's attention is faster than FlashAttention 2 (benchmarks/attention.py)."""

_FA3 = "fa3"
_FLASH = "FlashAttention 2"
_LONG = "FlashAttention 2, cuDNN for long sequences of heads of 64, 128 or 256"

GENERATIONS = (
    Generation("older than Ampere", (0, 0), (7, 9), "torch's own", ("torch",), "flashinfer or triton", False),
    Generation("Ampere", (8, 0), (8, 8), _FLASH, ("fla", "torch"), "flashinfer", False),
    Generation("Ada", (8, 9), (8, 9), _FLASH, ("fla", "torch"), "flashinfer", True),
    Generation("Hopper", (9, 0), (9, 9), _LONG, ("fla", "flashqla", "torch"), _FA3, True),
    Generation("Blackwell", (10, 0), (11, 9), _LONG, ("fla", "flashqla", "torch"), "trtllm_mha", True),
    Generation("Blackwell RTX", (12, 0), (12, 9), _LONG, ("fla", "torch"), "flashinfer", True),
)


def generation_of(capability: Capability) -> Generation | None:
    """None for one that is newer than the table."""
    return next((one for one in GENERATIONS if one.first <= capability <= one.last), None)


def engine_attention(found: Generation) -> str:
    """What engines of this machine take on such a GPU: SGLang's choice, or what stands in for FlashAttention-3 where
    that is missing."""
    return found.engine_attention if found.engine_attention != _FA3 or has_flash_attention_3() else "triton"


def has_flash_attention_3() -> bool:
    """Whether SGLang's package of kernels has its library. Engines load it to see that it runs, too, which takes
    seconds (`rollout/sglang_patches/attention_kernel.py`)."""
    found = find_spec("sgl_kernel")
    folders = found and found.submodule_search_locations or ()
    return any(any(Path(folder).glob("flash_ops*.so")) for folder in folders)


def support_line(capability: Capability | None) -> str:
    """What a run uses on such a GPU, None without one, unless its configuration says otherwise, in one line."""
    if capability is None:
        return "CPU: torch's own attention and Gated DeltaNet in the actor, torch_native attention in engines"
    found = generation_of(capability)
    name = f"SM{capability[0]}{capability[1]}"
    if found is None:
        return f"{name}, newer than what rlpipe knows: kernels are chosen as for the newest known"
    others = [one for one in found.gdn[1:] if one != "torch"]
    possible = f" ({', '.join(others)} possible)" if others else ""
    return (
        f"{found.name} ({name}): actor attention by {found.attention}, Gated DeltaNet by {found.gdn[0]}{possible}; "
        f"engine attention by {engine_attention(found)}; FP8 {'' if found.fp8 else 'not '}in hardware"
    )
