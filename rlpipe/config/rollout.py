"""Generation: engines, sampling and limits."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from rlpipe.config.agents import AgentConfig
from rlpipe.config.base import Section, Temperature, TopK
from rlpipe.config.draft import DraftConfig
from rlpipe.config.environment import EnvironmentConfig
from rlpipe.shared.errors import ConfigError


class SamplingConfig(Section):
    """How training responses are sampled."""

    temperature: Temperature = Field(1.0, gt=0)
    """Softmax temperature; the actor applies the same one to its log-probabilities."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus share. Below 1 the sampled distribution differs from the trained one."""

    top_k: TopK = -1
    """Keep only the k most likely tokens; -1 keeps all."""

    stop: list[str] = Field(default_factory=list)
    """Strings that end a response, besides the end-of-sequence token."""

    stop_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Token ids that end a response, besides the end-of-sequence token."""

    ignore_eos: bool = False
    """Generate every training response up to its token limit, for measuring: no token ends one. Evaluation is as
    ever."""


class EngineConfig(Section):
    """One SGLang engine."""

    tensor_parallel: int = Field(1, ge=1, le=2**10)
    """GPUs (or CPU processes) of one engine."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of weights and activations."""

    kv_cache_tokens: int | None = Field(None, ge=1)
    """Capacity of the KV pool in tokens; when empty, enough for `max_running_requests` requests of the longest kind, on
    a GPU within `memory_fraction`."""

    max_running_requests: int = Field(256, ge=1)
    """Requests decoded at the same time; one more on a GPU, where SGLang would otherwise run one fewer."""

    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = 0.6
    """Most of the device's memory that weights, KV pool and recurrent states may take. `auto`: the largest share that
    leaves room for the rest (docs/plan.md)."""

    context_tokens: int | None = Field(None, ge=1)
    """Longest prompt plus response; from the model's config when empty."""

    deterministic: bool = True
    """Derive each sample's random numbers from its id alone, and compute it alike in every batch (docs/determinism.md).
    Costs nothing on a CPU, and speed on a GPU."""

    quantization: Literal["none", "fp8", "fp8_all"] = "none"
    """`fp8`: experts in 8 bits, by blocks of 128 x 128, made by the actor with each weight update. `fp8_all`: attention
    projections and all feed-forward layers, too, which saves memory rather than time (docs/fp8.md)."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Keys and values in `dtype`, or in 8 bits, which is half the memory."""

    draft: DraftConfig = DraftConfig()
    """Speculative decoding."""

    sglang: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `sglang.srt.server_args.ServerArgs`, by their name there."""

    @model_validator(mode="after")
    def _fp8_is_made_of_bfloat16(self) -> Self:
        if self.dtype != "bfloat16" and (self.quantization != "none" or self.kv_cache_dtype == "fp8"):
            raise ValueError(
                f"rollout.engine.dtype is {self.dtype!r}, but FP8 weights and caches go with 'bfloat16': set it so, or "
                "quantization to 'none' and kv_cache_dtype to 'auto'"
            )
        if self.quantization != "none" and "json_model_override_args" in self.sglang:
            raise ValueError(
                "rollout.engine.sglang.json_model_override_args is there, through which rollout.engine.quantization "
                f"{self.quantization!r} is told to SGLang: leave one out"
            )
        return self

    @property
    def memory_share(self) -> float:
        """`memory_fraction`, which must have been chosen."""
        if self.memory_fraction == "auto":
            raise ConfigError("rollout.engine.memory_fraction is 'auto' and was not chosen: give a number below 1")
        return self.memory_fraction


class GenerateConfig(Section):
    """How one response comes about."""

    function: str = "single_turn"
    """`single_turn`, `environment` and `agent` (see there), `calculator` (a worked example of several turns with a
    tool), or your own as `package.module:function`: an `async def` that takes a
    `rlpipe.generation.conversation.Conversation`."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    environment: EnvironmentConfig | None = None
    """What answers the policy, for the function `environment`."""

    transcripts_per_iteration: int = Field(4, ge=0)
    """Episodes of several turns of each iteration that are kept whole in the run's `episodes.jsonl`, for the report and
    `rlpipe replay`."""

    agent: AgentConfig | None = None
    """Who asks the policy by OpenAI's API, for the function `agent`."""

    max_failed_share: float = Field(0.1, ge=0, le=1)
    """The run ends when the function raised an error for more than this share of an iteration's samples."""

    @property
    def is_single_turn(self) -> bool:
        return self.function == "single_turn"

    @property
    def needs_rows(self) -> bool:
        """Whether episodes are made of a row's prompt as it stands there, and not of its tokens."""
        return self.function == "agent"

    @model_validator(mode="after")
    def _an_agent_has_its_function(self) -> Self:
        if self.agent is not None and self.function != "agent":
            raise ValueError(
                f"rollout.generate.agent is there, but rollout.generate.function is {self.function!r}, which does not "
                "use it: set function to 'agent', or remove agent"
            )
        if self.function == "agent" and (self.agent is None or self.options):
            raise ValueError(
                "rollout.generate.function 'agent' takes its settings from rollout.generate.agent: give run or command "
                "there, and no rollout.generate.options"
            )
        return self

    @model_validator(mode="after")
    def _an_environment_has_its_function(self) -> Self:
        if self.environment is not None and self.function != "environment":
            raise ValueError(
                f"rollout.generate.environment {self.environment.name!r} is there, but rollout.generate.function is "
                f"{self.function!r}, which does not use it: set function to 'environment', or remove environment"
            )
        if self.function == "environment" and (self.environment is None or self.options):
            raise ValueError(
                "rollout.generate.function 'environment' takes its settings from rollout.generate.environment: give "
                "its name and options there, and no rollout.generate.options"
            )
        return self


class RolloutConfig(Section):
    """What is generated in an iteration, and by how many engines."""

    prompts_per_iteration: int = Field(16, ge=1, le=2**24)
    """Groups per iteration."""

    samples_per_prompt: int = Field(8, ge=1, le=2**20)
    """Responses in a group."""

    max_response_tokens: int = Field(1024, ge=1)
    """Token limit of a response."""

    engines: int = Field(1, ge=1, le=2**17)
    """SGLang engines."""

    request_routing: Literal["prefix", "least_loaded"] = "prefix"
    """Which engine gets a request. `prefix`: turns of a conversation stay on one engine, samples of a group share one,
    unless it is lost or overloaded; others go to the engine with the fewest tokens in flight. `least_loaded`: all do.
    No answer changes with it while `engine.deterministic` holds."""

    request_order: Literal["longest_first", "arrival"] = "longest_first"
    """Which request goes first where engines have no room for all. `longest_first`: that of the prompt whose responses
    were longest so far; a prompt that was never answered counts as the mean of its data set. `arrival`: the one that
    came first. No answer changes with it while `engine.deterministic` holds."""

    migration: bool = False
    """Move responses that are being written, once no request waits: the engine whose last one is expected to end last
    hands on those that have the least left to the engine with the fewest, which reads again what is written. As far as
    the pace of the iteration before says that it pays (docs/rollouts.md)."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training responses."""

    engine: EngineConfig = EngineConfig()
    """Settings of every engine."""

    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """`sync`: generate, then train. `one_step_off`: generate the next iteration's responses while this one's are
    trained; they finish under the weights that they began with. `async`: generate all the time, up to `max_staleness`
    iterations ahead; running responses go on under new weights, and batches form as groups finish."""

    max_staleness: int = Field(1, ge=1)
    """Most weight versions between a response's first token and its training. In mode `async` groups beyond it are
    dropped and counted; aborted responses beyond it start again (`partial`)."""

    filters: list[str] = Field(default_factory=list)
    """Finished groups are dropped, counted and replaced by those of further prompts where a filter says so:
    `equal_rewards` (dynamic sampling of DAPO), `truncated`, or your own as `package.module:function`."""

    max_groups_factor: float = Field(4.0, ge=1)
    """At most N times `prompts_per_iteration` groups are begun for an iteration; then it is trained with fewer
    (`rollout/missing_groups_count`)."""

    oversampling: float = Field(1.0, ge=1)
    """Start N times `prompts_per_iteration` groups; when enough have finished, the others are aborted."""

    partial: bool = False
    """Go on with aborted responses in the next iteration; otherwise they are dropped and counted."""

    mask_off_policy: bool = False
    """Leave tokens that were sampled by older weights out of the loss."""

    generate: GenerateConfig = GenerateConfig()
    """How one response comes about: once, or in several turns with tools."""

    @property
    def may_be_stale(self) -> bool:
        """Whether responses can hold tokens that older weights than those before the update sampled."""
        return self.iterations_ahead > 0 or self.partial

    @property
    def iterations_ahead(self) -> int:
        """How many iterations generation may be ahead of training."""
        return {"sync": 0, "one_step_off": 1, "async": self.max_staleness}[self.mode]

    @model_validator(mode="after")
    def _migration_helps_a_tail(self) -> Self:
        if self.migration and self.mode != "sync":
            raise ValueError(
                "rollout.migration shortens the end of an iteration's generation, for which rollout.mode "
                f"{self.mode!r} does not wait: set migration to false or mode to 'sync'"
            )
        if self.migration and self.engine.deterministic:
            raise ValueError(
                "rollout.migration moves responses by what engines take, so which ones are computed anew depends on "
                "time, but rollout.engine.deterministic is true: set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _aborting_needs_an_end(self) -> Self:
        if self.oversampling > 1 and self.mode != "sync":
            raise ValueError(
                f"rollout.oversampling is {self.oversampling:g}, but in rollout.mode '{self.mode}' generation goes on "
                "during training, so nothing need be aborted: set oversampling to 1 or mode to 'sync'"
            )
        if self.partial and self.oversampling == 1:
            raise ValueError(
                "rollout.partial goes on with aborted responses, but rollout.oversampling is 1, so none is aborted: "
                "raise oversampling, for instance to 1.5"
            )
        if self.oversampling > self.max_groups_factor:
            raise ValueError(
                f"rollout.oversampling {self.oversampling:g} exceeds rollout.max_groups_factor "
                f"{self.max_groups_factor:g}: raise the latter"
            )
        return self
