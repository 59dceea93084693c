"""From rows to tokenized prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpipe.config.data import DatasetConfig
from rlpipe.data.rows import Row, load_rows
from rlpipe.model.hub import model_folder
from rlpipe.shared.errors import DataError, ModelError
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one or several data sets, in file order, with what was left out."""

    prompts: tuple[Prompt, ...]
    too_long: int
    rows_skipped: int


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of the model folder or hub model `path`. Raises ModelError when there is none."""
    from transformers import AutoTokenizer

    folder = model_folder(path)
    # Without any of these, transformers makes an empty tokenizer and says nothing.
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ModelError(f"{path}: no tokenizer in this model folder; put one of {', '.join(_TOKENIZER_FILES)} there")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise ModelError(f"{path}: no tokenizer can be loaded from this model folder: {first}") from None


def load_prompts(
    datasets: Sequence[DatasetConfig],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    skip_bad_rows: bool,
) -> PromptSet:
    """Prompts of all `datasets`, concatenated. Raises DataError for a bad row or when nothing is short enough."""
    prompts: list[Prompt] = []
    too_long = skipped = 0
    for dataset in datasets:
        loaded = load_rows(dataset, skip_bad_rows)
        skipped += loaded.skipped
        for index, row in enumerate(loaded.rows):
            prompt = _prompt(index, row, dataset, tokenizer)
            if len(prompt.token_ids) > max_prompt_tokens:
                too_long += 1
            else:
                prompts.append(prompt)
    if not prompts:
        names = ", ".join(dataset.name for dataset in datasets)
        raise DataError(
            f"data sets {names}: all {too_long} prompts are longer than data.max_prompt_tokens = {max_prompt_tokens}"
        )
    return PromptSet(tuple(prompts), too_long, skipped)


def _prompt(index: int, row: Row, dataset: DatasetConfig, tokenizer: "PreTrainedTokenizerBase") -> Prompt:
    text = _render(row, dataset, tokenizer)
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    columns = {name: value for name, value in row.values.items() if name not in (dataset.prompt_column,)}
    if dataset.reward:
        columns["reward"] = dataset.reward
    return Prompt(
        prompt_id=f"{dataset.name}/{index}",
        text=text,
        token_ids=tuple(token_ids),
        label=str(row.values[dataset.label_column]),
        dataset=dataset.name,
        metadata=columns,
    )


def _render(row: Row, dataset: DatasetConfig, tokenizer: "PreTrainedTokenizerBase") -> str:
    prompt = row.values[dataset.prompt_column]
    if isinstance(prompt, str) and dataset.prompt_template:
        prompt = _fill(dataset.prompt_template, {"prompt": prompt}, row.place)
    if not dataset.apply_chat_template:
        if not isinstance(prompt, str):
            raise DataError(f"{row.place}: the prompt is a list of messages; set apply_chat_template to true")
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else message_list(prompt, row.place)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{row.place}: the tokenizer {tokenizer.name_or_path} has no chat template; set "
            "apply_chat_template to false"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def message_list(prompt: Any, place: str) -> list[dict[str, str]]:
    """`prompt` itself if it is a list of chat messages; DataError naming `place` otherwise."""
    well_formed = isinstance(prompt, list) and all(
        isinstance(message, Mapping) and "role" in message and "content" in message for message in prompt
    )
    if not well_formed:
        raise DataError(f"{place}: a prompt must be text or a list of messages with `role` and `content`")
    return prompt


def _fill(template: str, values: Mapping[str, Any], place: str) -> str:
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{place}: the template {template!r} cannot be filled: {error!r}") from None


def fill_from_row(template: str, prompt: Prompt) -> str:
    """`template` with the columns of the prompt's row."""
    return _fill(template, {"label": prompt.label, **prompt.metadata}, prompt.prompt_id)
