"""From the configuration to SGLang's ServerArgs."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.config.jit import JitConfig
from rlpipe.config.rollout import EngineConfig
from rlpipe.estimate.engine_pools import EnginePools
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.weights import EngineAdapter
from rollout.draft_arguments import draft_arguments
from rollout.engine_environment import DeviceKind
from rollout.fp8_arguments import fp8_arguments
from rollout.requests import SamplingParameters

CONTEXT_RESERVE_TOKENS = 2  # of the context, which SGLang keeps free of a request's tokens

_NEVER_TOKENS = 2**30

# What rollout/ itself decides; the key that the user means instead, where there is one.
_RESERVED = {
    "model_path": "model.path",
    "device": None,
    "tp_size": "rollout.engine.tensor_parallel",
    "dtype": "rollout.engine.dtype",
    "max_total_tokens": "rollout.engine.kv_cache_tokens",
    "max_running_requests": "rollout.engine.max_running_requests",
    "mem_fraction_static": "rollout.engine.memory_fraction",
    "context_length": "rollout.engine.context_tokens",
    "enable_deterministic_inference": "rollout.engine.deterministic",
    "random_seed": "seed",
    "skip_tokenizer_init": None,
    "enable_multimodal": None,
    "enable_return_routed_experts": "algorithm.routing_replay",
    "enable_memory_saver": "ray.sleep",
    "quantization": "rollout.engine.quantization",
    "kv_cache_dtype": "rollout.engine.kv_cache_dtype",
    "speculative_algorithm": "rollout.engine.draft.method",
    "speculative_draft_model_path": "rollout.engine.draft.method",
    "speculative_num_steps": "rollout.engine.draft.steps",
    "speculative_eagle_topk": "rollout.engine.draft.topk",
    "speculative_num_draft_tokens": "rollout.engine.draft.tokens",
    "speculative_adaptive": "rollout.engine.draft.method",
    "speculative_adaptive_config": "rollout.engine.draft.method",
    "speculative_use_rejection_sampling": None,
    "enable_lora": "weight_sync.adapters",
    "lora_paths": None,
    "lora_target_modules": "actor.lora.targets",
    "max_lora_rank": "actor.lora.rank",
    "max_loras_per_batch": None,
    "nccl_port": None,
    "dist_init_addr": None,
}


@dataclass(frozen=True)
class EngineSetup:
    """All that one engine is started with.

    `request_tokens` is the longest prompt plus response of the run; `needs_tokenizer` is set when stop strings are
    used; `verify_weights` asks for checksums of received weights; `sends_draft`: updates hold the weights of the layer
    that drafts, too; `instance` names the engine's temporary files;
    `log_path` receives what its processes print; `routes_shape`, layers and experts per token, asks for expert choices;
    `memory_saver` lets it give device memory back; `devices` are the GPUs to use, where Ray does not choose them;
    `warm_up` are kinds of sampling to meet every class of batch with before the engine is ready, () for no warm-up;
    `adapter`: room for one, which updates may bring beside the weights; `restart` counts the engines that were lost in
    its place; `awaits_weights` makes requests wait for an update; `later_turns`: requests come that begin with another
    one's prompt and response; `reuses_prefixes`: see `Config.reuses_prefixes`; `with_text`: responses are
    decoded.
    """

    index: int
    model_path: str
    device: DeviceKind
    engine: EngineConfig
    request_tokens: int
    needs_tokenizer: bool
    verify_weights: bool
    seed: int
    instance: str
    log_path: str
    routes_shape: tuple[int, int] | None = None
    memory_saver: bool = False
    sends_draft: bool = False
    devices: tuple[str, ...] = ()
    jit: JitConfig = JitConfig()
    warm_up: tuple[SamplingParameters, ...] = ()
    adapter: EngineAdapter | None = None
    restart: int = 0
    awaits_weights: bool = False
    later_turns: bool = True
    reuses_prefixes: bool = True
    with_text: bool = False


def replacement(setup: EngineSetup, awaits_weights: bool) -> EngineSetup:
    """Of the engine that takes the place of a lost one; its files have other names."""
    restart = setup.restart + 1
    instance = f"{setup.instance.removesuffix(f'r{setup.restart}')}r{restart}"
    return replace(
        setup,
        restart=restart,
        instance=instance,
        log_path=setup.log_path.replace(setup.instance, instance),
        awaits_weights=awaits_weights,
    )


def server_arguments(
    setup: EngineSetup, known: Collection[str], pools: EnginePools | None = None, recurrent: bool = False
) -> dict[str, Any]:
    """Keyword arguments for ServerArgs, whose fields are `known`. pools: on a GPU, of what the run can use. recurrent:
    whether the model has layers with recurrent states.

    Raises ConfigError for a name under `rollout.engine.sglang` that ServerArgs lacks or that rollout/ sets itself.
    """
    check_argument_names(setup.engine.sglang, known)
    per_device = _cpu_arguments(setup, recurrent) if setup.device == "cpu" else _cuda_arguments(setup, pools, recurrent)
    drafting = draft_arguments(setup.engine, setup.model_path, setup.sends_draft)
    return _common_arguments(setup) | per_device | drafting | _adapter_arguments(setup) | setup.engine.sglang


def kv_cache_tokens(setup: EngineSetup) -> int:
    """Size of the KV pool on a CPU: as configured, or so that no request ever has to wait for another's memory."""
    if setup.engine.kv_cache_tokens is not None:
        return setup.engine.kv_cache_tokens
    return running_slots(setup) * (setup.request_tokens + 8)


def running_slots(setup: EngineSetup) -> int:
    """What SGLang is told as the most requests at a time.

    One more where it cuts prompts into chunks: it then counts the request in the middle of its prompt twice
    (`Scheduler.get_num_allocatable_reqs`: as one that runs, and by its taken slot), and takes up one request too few
    until the first of them ends.
    """
    default = -1 if setup.device == "cpu" else 0
    chunk = setup.engine.sglang.get("chunked_prefill_size", default)
    return setup.engine.max_running_requests + (chunk is None or chunk >= 0)


def _common_arguments(setup: EngineSetup) -> dict[str, Any]:
    engine = setup.engine
    return {
        "model_path": setup.model_path,
        "dtype": engine.dtype,
        "tp_size": engine.tensor_parallel,
        "context_length": engine.context_tokens,
        "max_running_requests": running_slots(setup),
        "mem_fraction_static": engine.memory_share,
        "enable_deterministic_inference": engine.deterministic,
        "random_seed": setup.seed,
        "skip_tokenizer_init": not setup.needs_tokenizer,
        "skip_server_warmup": True,
        # Requests are token ids alone; otherwise a model with a vision tower needs its image processor.
        "enable_multimodal": False,
        "enable_return_routed_experts": setup.routes_shape is not None,
        # An idle engine otherwise spins on a core that the actor could use.
        "sleep_on_idle": True,
        "grammar_backend": "none",
        "log_level": "warning",
    }


def _cpu_arguments(setup: EngineSetup, recurrent: bool) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": kv_cache_tokens(setup),
        # SGLang's cache of recurrent states needs CUDA; and a recurrence that is taken up in the middle rounds
        # differently. Keys and values have the same bits either way (rollout/sglang_patches/cpu_attention.py).
        "disable_radix_cache": recurrent,
        "chunked_prefill_size": -1,
    }


def _cuda_arguments(setup: EngineSetup, pools: EnginePools | None, recurrent: bool) -> dict[str, Any]:
    # Every 256 tokens SGLang copies a request's recurrent states, from which a later turn goes on. The whole step waits
    # for the copy, and where requests are apart, some request is at such a place in nearly every step.
    never = {"mamba_track_interval": _NEVER_TOKENS} if recurrent and not setup.later_turns else {}
    return never | {
        "device": "cuda",
        **_pool_arguments(setup.engine, pools),
        # Capturing prefill graphs compiles for over a minute and gains nothing for decoding.
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": running_slots(setup),
        # SGLang would unfreeze all that the process has imported, and have the collector look at it.
        "enable_cudagraph_gc": True,
        "enable_memory_saver": setup.memory_saver,
        **fp8_arguments(setup.engine),
    }


def _adapter_arguments(setup: EngineSetup) -> dict[str, Any]:
    if setup.adapter is None:
        return {}
    cpu = {"lora_backend": "torch_native"} if setup.device == "cpu" else {}
    return cpu | {
        "enable_lora": True,
        "max_lora_rank": setup.adapter.rank,
        "lora_target_modules": list(setup.adapter.modules),
        "max_loras_per_batch": 2,  # ours and none at all, so that neither drives the other out
    }


def _pool_arguments(engine: EngineConfig, pools: EnginePools | None) -> dict[str, Any]:
    """Pools no larger than the run can use; where it could use more than there is, SGLang divides what it measures in
    the ratio of the needs. By itself it fills its share of the GPU, states with nine tenths of what tokens get."""
    if pools is None:
        return {"max_total_tokens": engine.kv_cache_tokens}
    if pools.fits:
        states = {} if pools.states is None else {"max_mamba_cache_size": pools.states}
        return {"max_total_tokens": pools.kv_tokens} | states
    recurrent = pools.states_bytes + pools.verified_bytes
    ratio = {"mamba_full_memory_ratio": recurrent / pools.kv_bytes} if pools.states and pools.kv_bytes else {}
    return {"max_total_tokens": engine.kv_cache_tokens} | ratio


def check_argument_names(extra: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for a name under `rollout.engine.sglang` that is not `known`, or that rollout/ sets itself."""
    for name in extra:
        if name in _RESERVED:
            instead = _RESERVED[name]
            advice = f"use {instead}" if instead else "remove it"
            raise ConfigError(f"rollout.engine.sglang.{name}: rollout sets this argument itself; {advice}")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else "see sglang.srt.server_args.ServerArgs"
            raise ConfigError(f"rollout.engine.sglang.{name}: SGLang has no such argument; {advice}")
