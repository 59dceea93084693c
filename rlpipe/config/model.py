"""The policy, and what a run may make before it starts: a tiny policy, a generated task."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section

_HYBRID_PERIOD = 4


class ModelConfig(Section):
    """The policy that is trained."""

    path: str
    """Folder with `config.json`, tokenizer and safetensors in Hugging Face layout, or a model of the hub: `owner/name`,
    or `owner/name@revision`. The cache (`HF_HOME`) is used first; `HF_TOKEN` and `HF_HUB_OFFLINE` are respected."""

    reference_path: str | None = None
    """Folder or hub name of the reference policy for the KL term; the initial policy when empty."""


class TinyPolicyConfig(Section):
    """A small policy with random weights and a byte-level tokenizer, made from the run's seed: no download."""

    architecture: Literal["qwen3", "qwen3_5_moe"] = "qwen3"
    """Shape family of the policy."""

    hidden_size: int = Field(128, ge=8, le=2**20)
    """Width of the residual stream."""

    layers: int = Field(4, ge=1, le=1024)
    """Decoder layers."""

    heads: int = Field(4, ge=1, le=2**20)
    """Query heads."""

    key_value_heads: int = Field(2, ge=1, le=2**20)
    """Key/value heads of grouped-query attention."""

    head_dim: int = Field(32, ge=2, le=2**20)
    """Width of a head."""

    intermediate_size: int = Field(256, ge=8, le=2**20)
    """Width of the gated feed-forward layer."""

    experts: int = Field(8, ge=2, le=2**20)
    """Experts of a mixture-of-experts layer, where the architecture has them."""

    experts_per_token: int = Field(2, ge=1, le=2**20)
    """Experts that a token is sent to."""

    expert_intermediate_size: int = Field(64, ge=8, le=2**20)
    """Width of an expert, and of the shared expert."""

    prediction_layer: bool = False
    """Also a random multi-token-prediction layer, to be trained (`actor.train_mtp`) and to draft with; of the
    architecture `qwen3_5_moe`."""

    @model_validator(mode="after")
    def _a_hybrid_has_softmax_attention(self) -> Self:
        if self.architecture == "qwen3_5_moe" and self.layers < _HYBRID_PERIOD:
            raise ValueError(
                f"prepare.policy.layers is {self.layers}, but of the layers of 'qwen3_5_moe' every {_HYBRID_PERIOD}th "
                f"is softmax attention, and there has to be one: set it to at least {_HYBRID_PERIOD}"
            )
        return self

    @model_validator(mode="after")
    def _the_architecture_has_a_prediction_layer(self) -> Self:
        if self.prediction_layer and self.architecture != "qwen3_5_moe":
            raise ValueError(
                f"prepare.policy.prediction_layer is on, but the architecture is {self.architecture!r}, which has none:"
                " set it to 'qwen3_5_moe', or prediction_layer to false"
            )
        return self


class ArithmeticTaskConfig(Section):
    """Generated sums in DAPO-math format: jsonl with `prompt` and `label` (and a worked `solution`)."""

    digits: int = Field(2, ge=1, le=6)
    """Operands are drawn from 0 to 10^digits - 1."""

    operands: int = Field(2, ge=2, le=6)
    """Numbers that are added."""

    train_problems: int = Field(2048, ge=1)
    """Problems in train.jsonl."""

    test_problems: int = Field(128, ge=1)
    """Problems in test.jsonl; none of them, in any order of its operands, occurs in train.jsonl."""


class TasksConfig(Section):
    """Tasks that the environment of `rollout.generate.environment` makes itself."""

    train: int = Field(2048, ge=1)
    """Tasks in train.jsonl."""

    test: int = Field(128, ge=1)
    """Tasks in test.jsonl; none of them is in train.jsonl."""


class PrepareConfig(Section):
    """Made once, before the run, when the files do not exist yet."""

    policy: TinyPolicyConfig | None = None
    """Make a tiny policy at `model.path`."""

    arithmetic: ArithmeticTaskConfig | None = None
    """Generate arithmetic problems into `directory`."""

    tasks: TasksConfig | None = None
    """Have the environment generate tasks into `directory`."""

    directory: str | None = None
    """Where generated data goes."""
