"""What of an engine's memory its KV pool and its recurrent states need, and how they share what there is."""

from dataclasses import dataclass, replace

from rlpipe.config.rollout import EngineConfig
from rlpipe.flops.layers import GatedDeltaNet, GroupedQueryAttention
from rlpipe.flops.shape import ModelShape

# Slots for recurrent states that SGLang wants for each running request (`KVCacheConfigurator._calculate_mamba_ratio`):
# its prefix cache keeps states at the ends of prompts, and where it overlaps scheduling with computing, two more are in
# flight.
_STATES_PER_REQUEST = 3
_STATES_PER_REQUEST_OVERLAPPED = 5
_OVERLAPPED_STRATEGY = "extra_buffer"
LEAST_SHARED_TOKENS = 64
"""Of a prompt that a group has in common and an engine computes once; below, another pass costs more than it saves."""

_SPARE_TOKENS = 8  # of a request, beyond its longest
_FITS_SHARE = 0.95  # of the estimated room: beyond it, SGLang is left to measure


@dataclass(frozen=True)
class EnginePools:
    """Capacities of one engine, and bytes of one token and of one state on each of its devices.

    states: slots for recurrent states; None without Gated DeltaNet layers.
    verified_bytes: of the states after each drafted token, which are kept until it is known how many stay.
    fits: they hold everything that the requests running at a time can need, so no request ever waits for memory.
    """

    kv_tokens: int
    states: int | None
    token_bytes: int
    state_bytes: int
    fits: bool
    verified_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.token_bytes

    @property
    def states_bytes(self) -> int:
        return (self.states or 0) * self.state_bytes


def needed_pools(
    shape: ModelShape, engine: EngineConfig, architecture: str, requests: int, tokens: int, reuses_prefixes: bool = True
) -> EnginePools:
    """For `requests` at a time of at most `tokens` each; what the configuration says itself stays.

    architecture: the class that config.json names, on which SGLang's prefix cache of states depends. reuses_prefixes:
    see `Config.reuses_prefixes`.
    """
    element = {"float32": 4, "bfloat16": 2}[engine.dtype]
    attention = [layer.mixer for layer in shape.layers if isinstance(layer.mixer, GroupedQueryAttention)]
    recurrent = [layer.mixer for layer in shape.layers if isinstance(layer.mixer, GatedDeltaNet)]
    drafting = attention[-1:] if engine.draft.predicts else []  # the prediction layer has keys and values of its own
    kept = 1 if engine.kv_cache_dtype == "fp8" else element
    token_bytes = sum(2 * mixer.key_value_heads * mixer.head_dim * kept for mixer in (*attention, *drafting))
    shared_by = min(engine.tensor_parallel, min((mixer.key_value_heads for mixer in attention), default=1))
    state_bytes = sum(_state_bytes(mixer, element) for mixer in recurrent) // engine.tensor_parallel
    per_request = states_per_request(engine, architecture, reuses_prefixes)
    states = engine.sglang.get("max_mamba_cache_size") or requests * per_request
    verified, replayed = engine.draft.verified_tokens, engine.sglang.get("enable_linear_replayssm_spec")
    # SGLang takes room for two passes ahead (`get_alloc_reserve_per_decode`).
    ahead = 2 * max(verified, engine.draft.steps * engine.draft.branches) if verified > 1 else 0
    return EnginePools(
        kv_tokens=engine.kv_cache_tokens or requests * (tokens + _SPARE_TOKENS + ahead),
        states=int(states) if recurrent else None,
        token_bytes=max(1, token_bytes // shared_by),
        state_bytes=state_bytes,
        fits=True,
        verified_bytes=(requests + 1) * verified * state_bytes if verified > 1 and not replayed else 0,
    )


def pools_within(needed: EnginePools, room_bytes: int) -> EnginePools:
    """`needed` where it fits into `room_bytes` of a device, otherwise both pools smaller by the same factor."""
    room = max(0, int(room_bytes * _FITS_SHARE) - needed.verified_bytes)
    wanted = needed.kv_bytes + needed.states_bytes
    if wanted <= room:
        return needed
    factor = room / wanted
    states = None if needed.states is None else int(needed.states * factor)
    return replace(needed, kv_tokens=int(needed.kv_tokens * factor), states=states, fits=False)


def room_beside(needed: EnginePools, room_bytes: int) -> int:
    """How much of `room_bytes` others may take without `pools_within` giving other pools; 0 where they do not fit."""
    return max(0, int(room_bytes - (needed.kv_bytes + needed.states_bytes + needed.verified_bytes) / _FITS_SHARE))


def forgets_prefixes(engine: EngineConfig, architecture: str, reuses_prefixes: bool) -> bool:
    """Whether engines of a policy with recurrent states do without a cache of prefixes: where the run does not reuse
    them, and where drafts cost it: a state that has run ahead must not be kept. SGLang looks after that for the text
    forms of Qwen3.5 by our patch alone (rollout/sglang_patches/state_caches.py), and nobody has seen the patch keep
    them right beside drafts."""
    drafts = engine.draft.predicts and architecture.startswith("Qwen3_5") and architecture.endswith("ForCausalLM")
    return drafts or not reuses_prefixes


def states_per_request(engine: EngineConfig, architecture: str, reuses_prefixes: bool = True) -> int:
    """Slots for recurrent states for each running request, by SGLang's rule."""
    if engine.sglang.get("disable_radix_cache", forgets_prefixes(engine, architecture, reuses_prefixes)):
        return 1
    strategy = engine.sglang.get("mamba_radix_cache_strategy", "auto")
    if strategy == "auto":
        strategy = "no_buffer" if engine.sglang.get("disable_overlap_schedule") else _OVERLAPPED_STRATEGY
    return _STATES_PER_REQUEST_OVERLAPPED if strategy == _OVERLAPPED_STRATEGY else _STATES_PER_REQUEST


def _state_bytes(mixer: GatedDeltaNet, element: int) -> int:
    """One sequence's recurrent state in float32 and the last inputs of its convolution."""
    state = mixer.value_heads * mixer.key_head_dim * mixer.value_head_dim * 4
    channels = 2 * mixer.key_heads * mixer.key_head_dim + mixer.value_heads * mixer.value_head_dim
    return state + channels * (mixer.conv_width - 1) * element
