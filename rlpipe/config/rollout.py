"""Generation: engines, sampling and limits."""

from typing import Any, Literal

from pydantic import Field

from rlpipe.config.base import Section


class SamplingConfig(Section):
    """How training responses are sampled."""

    temperature: float = Field(1.0, gt=0)
    """Softmax temperature; the actor applies the same one to its log-probabilities."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus share. Below 1 the sampled distribution differs from the trained one."""

    top_k: int = Field(-1, ge=-1)
    """Keep only the k most likely tokens; -1 keeps all."""

    stop: list[str] = Field(default_factory=list)
    """Strings that end a response, besides the end-of-sequence token."""

    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a response, besides the end-of-sequence token."""


class EngineConfig(Section):
    """One SGLang engine."""

    tensor_parallel: int = Field(1, ge=1)
    """GPUs (or CPU processes) of one engine."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and activations."""

    kv_cache_tokens: int | None = Field(None, ge=1)
    """Capacity of the KV pool in tokens; when empty, from `memory_fraction` on a GPU, and on a CPU enough for
    `max_running_requests` requests of the longest kind."""

    max_running_requests: int = Field(256, ge=1)
    """Requests decoded at the same time."""

    memory_fraction: float = Field(0.6, gt=0, lt=1)
    """Share of device memory for weights and KV pool."""

    context_tokens: int | None = Field(None, ge=1)
    """Longest prompt plus response; from the model's config when empty."""

    deterministic: bool = True
    """Derive each sample's random numbers from its id alone, and compute it alike in every batch (docs/determinism.md).
    Costs nothing on a CPU, and speed on a GPU."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `sglang.srt.server_args.ServerArgs`, by their name there."""


class RolloutConfig(Section):
    """What is generated in an iteration, and by how many engines."""

    prompts_per_iteration: int = Field(16, ge=1)
    """Groups per iteration."""

    samples_per_prompt: int = Field(8, ge=1)
    """Responses in a group."""

    max_response_tokens: int = Field(1024, ge=1)
    """Token limit of a response."""

    engines: int = Field(1, ge=1)
    """SGLang engines; requests go to the one with the fewest tokens in flight."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training responses."""

    engine: EngineConfig = EngineConfig()
    """Settings of every engine."""
