"""Where prompts come from."""

from typing import Self

from pydantic import Field, model_validator

from rlpipe.config.base import Section


class DatasetConfig(Section):
    """One source of prompts with labels."""

    name: str
    """Name of the data set in metrics, sample ids and reports."""

    path: str
    """A .jsonl, .json or .parquet file, a folder of such files, or the name of a data set on the hub."""

    split: str = "train"
    """Split, when `path` names a hub data set or a folder that has splits. Slices as in `train[:100]` are allowed."""

    rows: str | None = None
    """Slice of the rows kept, `start:stop`, after loading; either side may be empty."""

    prompt_column: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages (`role`, `content`)."""

    label_column: str = "label"
    """Column that holds the expected answer, handed to the grader."""

    apply_chat_template: bool = True
    """Render the prompt with the tokenizer's chat template (a text prompt becomes one user message)."""

    prompt_template: str | None = None
    """Python format string with `{prompt}`, applied to a text prompt before the chat template."""

    reward: str | None = None
    """Grader for this data set; the one of the `reward` section when empty."""


class DataConfig(Section):
    """The training prompts and how rows are treated."""

    train: list[DatasetConfig] = Field(min_length=1)
    """Training data sets; their rows are concatenated, then shuffled."""

    shuffle: bool = True
    """Shuffle the training prompts anew in each epoch, from the run's seed."""

    max_prompt_tokens: int = Field(512, ge=1)
    """Longer prompts are left out and counted (`data/prompts_too_long`)."""

    skip_bad_rows: bool = False
    """Count and skip rows that are malformed or lack a column; otherwise the first is an error with file and line."""


class EvalConfig(Section):
    """Held-out evaluation."""

    datasets: list[DatasetConfig] = Field(default_factory=list)
    """Evaluation data sets; none: no evaluation."""

    interval_iterations: int = Field(10, ge=0)
    """Evaluate after every so many iterations; 0: only before the first and after the last one."""

    before_training: bool = True
    """Evaluate the initial policy."""

    samples_per_prompt: int = Field(1, ge=1)
    """Answers per problem; above 1 they are sampled and pass@k is reported."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling share when `temperature` is above 0."""

    max_response_tokens: int | None = Field(None, ge=1)
    """Token limit of an answer; the one of `rollout` when empty."""

    @model_validator(mode="after")
    def _several_greedy_answers_are_equal(self) -> Self:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples_per_prompt is {self.samples_per_prompt} but eval.temperature is 0, so all answers "
                "would be equal: set eval.temperature above 0 or samples_per_prompt to 1"
            )
        return self
