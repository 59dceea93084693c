"""Where prompts come from."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, NonNegativeInt, field_validator, model_validator

from rlpipe.config.base import Name, Section, Temperature, Template, TopK, template_fields

_ARGUMENTS_OF_OURS = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
_ROWS = re.compile(r"(-?\d{1,18})?:(-?\d{1,18})?")


class DatasetConfig(Section):
    """One source of prompts with labels."""

    name: Name
    """Name of the data set in metrics, sample ids and reports; a training set and an evaluation set may share one."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files or one that `datasets` wrote (`save_to_disk`), or the
    name of a data set on the hub, also with a revision: `owner/name@revision`."""

    split: str = "train"
    """Split of a hub data set (`train[:100]` is allowed there), or of a folder: its files `train.jsonl`,
    `train-*.parquet`. A folder whose files are not named after splits is read whole."""

    subset: Name | None = None
    """Configuration of a hub data set that has several, `main` of GSM8K for instance; of a folder, the folder within it
    that has this name."""

    rows: str | None = None
    """Slice of the rows kept, `start:stop`, after loading; either side may be empty."""

    streaming: bool = False
    """Take the rows from the hub as they come, without downloading the whole data set; `rows` says how many."""

    prompt_column: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages (`role` and `content`, which may be parts of text;
    `tool_calls` and `reasoning_content` of the assistant; also `from` and `value`)."""

    label_column: str = "label"
    """Column that holds the expected answer, handed to the grader."""

    tools_column: str | None = None
    """Column that holds the tools that the chat template shows: a list of their JSON schemas, or JSON text of one. A
    row may have none (null)."""

    apply_chat_template: bool = True
    """Render the prompt with the tokenizer's chat template (a text prompt becomes one user message)."""

    prompt_template: Template | None = None
    """Format string with `{prompt}`, applied to a text prompt before the chat template."""

    allow_special_tokens: bool = False
    """Let text of special tokens in rows (`<|im_end|>`) become those tokens, for prompts that were rendered before.
    Otherwise it stays text, and rows that hold some are counted (`data/special_text_rows`)."""

    reward: str | None = None
    """Grader for this data set; the one of the `reward` section when empty."""

    @field_validator("prompt_template")
    @classmethod
    def _the_template_holds_the_prompt(cls, template: str | None) -> str | None:
        if template is not None and set(template_fields(template)) != {"prompt"}:
            raise ValueError(f"{template[:100]!r} must name {{prompt}}, and no other column")
        return template

    @field_validator("rows")
    @classmethod
    def _rows_are_a_slice(cls, rows: str | None) -> str | None:
        if rows is not None and not _ROWS.fullmatch(rows):
            raise ValueError(f"{rows[:40]!r} must be start:stop, for instance 0:100")
        return rows

    @model_validator(mode="after")
    def _a_stream_ends(self) -> Self:
        if self.streaming and not re.fullmatch(r"\d*:\d+", self.rows or ""):
            raise ValueError(
                f"data set {self.name!r}: a streamed data set has no end, but rows is {self.rows!r}: set rows to those "
                "that are wanted, for instance 0:100000"
            )
        return self


class SamplingOverrides(Section):
    """Sampling of one data set where it differs from the rest."""

    max_response_tokens: int | None = Field(None, ge=1)
    """Token limit of a response."""

    temperature: Temperature | None = Field(None, ge=0)
    """Softmax temperature; 0 is greedy, and for evaluation only."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus share."""

    top_k: TopK | None = None
    """Keep only the k most likely tokens; -1 keeps all."""

    stop: list[str] | None = None
    """Strings that end a response, besides the end-of-sequence token."""

    stop_token_ids: list[NonNegativeInt] | None = None
    """Token ids that end a response, besides the end-of-sequence token."""


class TrainingDatasetConfig(DatasetConfig):
    """A training data set."""

    sampling: SamplingOverrides = SamplingOverrides()
    """Sampling of this data set; what is empty is as in `rollout`. The actor applies the same temperature."""

    @field_validator("sampling")
    @classmethod
    def _greedy_responses_teach_nothing(cls, sampling: SamplingOverrides) -> SamplingOverrides:
        if sampling.temperature == 0:
            raise ValueError("data.train: sampling.temperature 0 makes all responses of a group equal: set it above 0")
        return sampling


class EvalDatasetConfig(DatasetConfig):
    """An evaluation data set; what is empty is as in `eval`."""

    samples_per_prompt: int | None = Field(None, ge=1)
    """Answers per problem; above 1 they are sampled and pass@k is reported."""

    interval_iterations: int | None = Field(None, ge=0)
    """Evaluate on this set after every N iterations; 0: only before the first and after the last one."""

    sampling: SamplingOverrides = SamplingOverrides()
    """Sampling on this data set."""


class DataConfig(Section):
    """The training prompts and how rows are treated."""

    train: list[TrainingDatasetConfig] = Field(min_length=1)
    """Training data sets; their rows are concatenated, then shuffled."""

    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    """What the chat template is given beside messages and tools, in training and evaluation: `{enable_thinking: false}`
    of Qwen3, for instance. Agents' requests may say otherwise (`chat_template_kwargs`)."""

    shuffle: bool = True
    """Shuffle the training prompts anew in each epoch, from the run's seed."""

    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are left out and counted (`data/prompts_too_long`)."""

    cache_directory: str | None = None
    """Where rendered and tokenized rows are kept between runs; in the cache of `datasets` (`HF_HOME`) when empty."""

    processes: int | None = Field(None, ge=1, le=2**12)
    """Processes that render and tokenize rows the first time; one for each core when empty."""

    skip_bad_rows: bool = False
    """Count and skip rows that are malformed or lack a column; otherwise the first is an error with file and line."""

    @field_validator("chat_template_arguments")
    @classmethod
    def _no_argument_is_the_systems(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if not name.isidentifier():
                raise ValueError(f"{name[:40]!r} is no name of a chat template's argument")
            if name in _ARGUMENTS_OF_OURS:
                raise ValueError(f"{name!r} is not the template's own argument, and is set by rlpipe: remove it")
        return arguments

    @field_validator("train")
    @classmethod
    def _names_are_different(cls, train: list[TrainingDatasetConfig]) -> list[TrainingDatasetConfig]:
        _refuse_equal_names(train)
        return train


class EvalConfig(Section):
    """Held-out evaluation: of answers, or in supervised runs of the loss on rows made like the trained ones."""

    datasets: list[EvalDatasetConfig] = Field(default_factory=list)
    """Evaluation data sets; none: no evaluation."""

    interval_iterations: int = Field(10, ge=0)
    """Evaluate after every N iterations; 0: only before the first and after the last one."""

    before_training: bool = True
    """Evaluate the initial policy."""

    samples_per_prompt: int = Field(1, ge=1)
    """Answers per problem; above 1 they are sampled and pass@k is reported."""

    temperature: Temperature = Field(0.0, ge=0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling share when `temperature` is above 0."""

    max_response_tokens: int | None = Field(None, ge=1)
    """Token limit of an answer; the one of `rollout` when empty."""

    allow_training_rows: bool = False
    """Let evaluation sets share rows with training sets, to see how well those are learned; otherwise refused."""

    @field_validator("datasets")
    @classmethod
    def _names_are_different(cls, datasets: list[EvalDatasetConfig]) -> list[EvalDatasetConfig]:
        _refuse_equal_names(datasets)
        return datasets

    def samples_of(self, dataset: EvalDatasetConfig) -> int:
        """Answers per problem of `dataset`."""
        return dataset.samples_per_prompt or self.samples_per_prompt

    def temperature_of(self, dataset: EvalDatasetConfig) -> float:
        """Temperature on `dataset`."""
        own = dataset.sampling.temperature
        return self.temperature if own is None else own

    def interval_of(self, dataset: EvalDatasetConfig) -> int:
        """Iterations between evaluations on `dataset`."""
        return self.interval_iterations if dataset.interval_iterations is None else dataset.interval_iterations

    @model_validator(mode="after")
    def _several_greedy_answers_are_equal(self) -> Self:
        for place, samples, temperature in [
            ("eval", self.samples_per_prompt, self.temperature),
            *((f"eval.datasets ({one.name})", self.samples_of(one), self.temperature_of(one)) for one in self.datasets),
        ]:
            if samples > 1 and temperature == 0:
                raise ValueError(
                    f"{place}: samples_per_prompt is {samples} but temperature is 0, so all answers would be equal: "
                    "set temperature above 0 or samples_per_prompt to 1"
                )
        return self


def _refuse_equal_names(datasets: Sequence[DatasetConfig]) -> None:
    name, times = Counter(dataset.name for dataset in datasets).most_common(1)[0] if datasets else ("", 0)
    if times > 1:
        raise ValueError(f"{times} data sets have the name {name!r}, and could not be told apart: rename all but one")
