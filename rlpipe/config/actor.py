"""The Megatron-core actor: parallel layout, optimizer, memory."""

import math
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlpipe.config.base import Section
from rlpipe.config.comm_guard import CommGuardConfig
from rlpipe.config.lora import LoraConfig
from rlpipe.shared.errors import ConfigError
from rlpipe.shared.pack_multiples import pack_multiple

_GPU_HEAD_CHUNK_TOKENS, _CPU_HEAD_CHUNK_TOKENS = 4096, 1024
LARGEST_BFLOAT16_BETA2 = 0.996  # 8 bits of mantissa: 1 - beta2 must be above 2^-8


class ParallelConfig(Section):
    """How the policy is split. The data-parallel size is what is left of `processes`."""

    tensor: int = Field(1, ge=1)
    """Tensor-parallel size (TP)."""

    sequence: bool = False
    """Sequence parallelism of the norms within TP; needed for experts with TP above 1."""

    pipeline: int = Field(1, ge=1)
    """Pipeline stages (PP)."""

    virtual_pipeline: int | None = Field(None, ge=2)
    """Model chunks per pipeline stage (interleaved schedule)."""

    context: int = Field(1, ge=1)
    """Context-parallel size (CP): each sequence is cut into 2 x CP pieces."""

    expert: int = Field(1, ge=1)
    """Expert-parallel size (EP); experts are never split within (ETP is 1)."""

    @property
    def exchanges_activations(self) -> bool:
        """Whether ranks send each other activations, and not gradients and weights alone."""
        return max(self.tensor, self.context, self.expert, self.pipeline) > 1

    @property
    def pack_multiple(self) -> int:
        """Tokens of a pack are a multiple of it: CP cuts each sequence into 2 x CP pieces, TP shares CP's tokens."""
        return pack_multiple(self.context, self.tensor, self.sequence)

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("actor.parallel.sequence needs actor.parallel.tensor above 1: set it to false")
        if self.virtual_pipeline and self.pipeline == 1:
            raise ValueError("actor.parallel.virtual_pipeline needs actor.parallel.pipeline above 1: leave it empty")
        return self


class OptimizerConfig(Section):
    """Adam with decoupled weight decay; the moments and fp32 masters may live in host memory."""

    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate."""

    minimum_learning_rate: float = Field(0.0, ge=0)
    """Where the decay ends."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up."""

    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up."""

    decay_steps: int | None = Field(None, ge=1)
    """Steps until `minimum_learning_rate`; all steps of the run when empty."""

    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; norms, biases and one-dimensional parameters are exempt."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(0.98, ge=0, lt=1)
    """Decay of the second moment."""

    epsilon: float = Field(1e-8, gt=0)
    """Added to the denominator of the update."""

    max_gradient_norm: float = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""

    cpu_offload_fraction: float = Field(1.0, ge=0, le=1)
    """Share of the optimizer state that lives in host memory. On a GPU it passes through device memory for the update:
    what has room is uploaded during the forward and backward passes, and downloads run beside what follows."""

    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of Adam's moments."""

    device_cache_gigabytes: float | None = Field(None, ge=0)
    """Device memory that optimizer states of host memory may take while the actor works, per GPU; as far as colocated
    engines leave room they stay during generation too. Empty: what the passes leave free."""

    @model_validator(mode="after")
    def _moments_can_change(self) -> Self:
        if self.moments_dtype == "bfloat16" and self.beta2 > LARGEST_BFLOAT16_BETA2:
            raise ValueError(
                f"actor.optimizer.beta2 is {self.beta2}, but a second moment in bfloat16 loses changes below 1/256 of "
                f"its value: use at most {LARGEST_BFLOAT16_BETA2}, or moments_dtype float32"
            )
        return self


class RecomputeConfig(Section):
    """Which activations are computed again in the backward pass instead of kept."""

    granularity: Literal["none", "selective", "full", "auto"] = "none"
    """`full`: whole layers; `selective`: the `modules`; `auto`: `none` where it fits, otherwise
    `full` (docs/plan.md)."""

    modules: list[Literal["core_attn", "mlp", "moe", "shared_experts"]] = Field(["core_attn"], min_length=1)
    """Megatron names of the modules of `selective`: attention without its projections, a dense feed-forward layer,
    a layer of experts, the shared expert of one."""

    @property
    def chosen(self) -> Literal["none", "selective", "full"]:
        """`granularity`, which must have been chosen."""
        if self.granularity == "auto":
            raise ConfigError("actor.recompute.granularity is 'auto' and was not chosen: give one of none, full")
        return self.granularity


class ActorConfig(Section):
    """The training side."""

    processes: int = Field(1, ge=1, le=2**17)
    """Processes, one per GPU (or one per CPU process)."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of parameters and activations; gradients are reduced and masters kept in float32."""

    parallel: ParallelConfig = ParallelConfig()
    """Parallel layout."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""

    recompute: RecomputeConfig = RecomputeConfig()
    """Activation recomputation."""

    comm_guard: CommGuardConfig = CommGuardConfig()
    """Memory guard of collectives."""

    max_tokens_per_gpu: Annotated[int, Field(ge=1)] | Literal["auto"] = 8192
    """Hard token budget of a pack per GPU; a pack holds at most this times CP, padding included. `auto`: for as many of
    the longest sequences as train fastest in the GPU's memory (docs/plan.md)."""

    pack_bucket_tokens: int = Field(1, ge=1)
    """Packs are padded to a multiple of it, so that kernels compile for few lengths; 2048 suits FLA's kernels."""

    forward_max_tokens_per_gpu: int | None = Field(None, ge=1)
    """The same for passes without gradients; `max_tokens_per_gpu` when empty."""

    logprob_chunk_tokens: int | None = Field(None, ge=1)
    """Tokens whose logits exist at the same time in the head; when empty 4,096 on a GPU, whose kernels keep them once
    and in the weights' dtype, and 1,024 elsewhere."""

    gdn_backend: Literal["auto", "torch", "fla", "flashqla"] = "auto"
    """Kernel of Gated DeltaNet layers; `auto` is `fla` on CUDA and `torch` elsewhere."""

    train_mtp: bool = False
    """Train multi-token-prediction layers with their own loss."""

    mtp_loss_weight: float = Field(0.1, ge=0)
    """Weight of that loss."""

    frozen_parameters: list[str] = Field(default_factory=list)
    """Regular expressions of Hugging Face parameter names that are not trained."""

    lora: LoraConfig | None = None
    """Train low-rank adapters and freeze the model."""

    max_skipped_updates: int = Field(3, ge=1)
    """Consecutive skipped updates (non-finite loss or gradient) after which the run stops."""

    peak_tflops: float | None = Field(None, gt=0)
    """Dense bf16 TFLOP/s of one device, for MFU and HFU; by the device's name when empty."""

    threads: int = Field(1, ge=1, le=2**12)
    """CPU threads of each process, at most as many as there are cores."""

    @property
    def pack_tokens(self) -> int:
        """`max_tokens_per_gpu`, which must have been chosen."""
        if self.max_tokens_per_gpu == "auto":
            raise ConfigError("actor.max_tokens_per_gpu is 'auto' and was not chosen: give a number of tokens")
        return self.max_tokens_per_gpu

    def head_chunk_tokens(self, on_gpu: bool) -> int:
        """`logprob_chunk_tokens`, or what holds when it is empty."""
        return self.logprob_chunk_tokens or (_GPU_HEAD_CHUNK_TOKENS if on_gpu else _CPU_HEAD_CHUNK_TOKENS)

    @property
    def pack_multiple(self) -> int:
        """Tokens of a pack are a multiple of it: what the layout asks for, and the bucket."""
        return math.lcm(self.parallel.pack_multiple, self.pack_bucket_tokens)

    @field_validator("frozen_parameters")
    @classmethod
    def _patterns_are_regular_expressions(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{pattern[:80]!r} is not a regular expression: {error}") from None
        return patterns

    @model_validator(mode="after")
    def _adapters_are_all_that_is_trained(self) -> Self:
        if self.lora is None:
            return self
        if self.frozen_parameters:
            raise ValueError("actor.frozen_parameters and actor.lora, which freezes the whole model: leave one out")
        if self.train_mtp:
            raise ValueError("actor.train_mtp trains weights that actor.lora freezes: leave one out")
        return self

    @model_validator(mode="after")
    def _layout_fills_the_processes(self) -> Self:
        p = self.parallel
        for name, size in (
            ("tensor x pipeline x context", p.tensor * p.pipeline * p.context),
            ("expert x pipeline", p.expert * p.pipeline),
        ):
            if self.processes % size:
                raise ValueError(
                    f"actor.processes is {self.processes}, not a multiple of {name} = {size}: "
                    "change actor.processes or actor.parallel"
                )
        return self
