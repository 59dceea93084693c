"""From rows to tokenized prompts."""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.config.data import DatasetConfig
from rlpipe.data.auto_tokenizer import auto_tokenizer
from rlpipe.data.chat_messages import template_message
from rlpipe.data.chat_template import check_template_arguments, render_chat
from rlpipe.data.joined_rows import JoinedRows
from rlpipe.data.mapped_rows import (
    EncodedRow,
    MappedRows,
    Preparation,
    RowCounts,
    RowEncoder,
    fingerprint_of,
    map_rows,
)
from rlpipe.data.row_source import first_line
from rlpipe.data.rows import Row
from rlpipe.data.special_text import SpecialText
from rlpipe.model.hub import model_folder
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.errors import DataError, ModelError
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class PromptTable(JoinedRows[Prompt]):
    """Prompts of data sets."""

    def make(self, dataset: DatasetConfig, rows: MappedRows, position: int) -> Prompt:
        row = rows.row(position)
        return Prompt(
            prompt_id=f"{dataset.name}/{rows.numbers[position]}",
            text=row["text"],
            token_ids=tuple(row["token_ids"]),
            label=row["label"],
            dataset=dataset.name,
            metadata=json.loads(row["metadata"]),
        )

    @property
    def digests(self) -> NDArray[np.int64]:
        """A number for each prompt, equal where the texts are."""
        return np.concatenate([rows.digests for _, rows in self.parts])


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one or several data sets, in file order, and what became of all rows."""

    prompts: PromptTable
    rows: RowCounts

    @property
    def fingerprint(self) -> str:
        """Changes with any token or label, and with their order."""
        return fingerprint_of(self.prompts.parts)


@dataclass(frozen=True)
class PromptEncoder(RowEncoder):
    """A row as a prompt. `keep_prompt`: the prompt column stays in its metadata, as it is in the row."""

    max_prompt_tokens: int = 0
    keep_prompt: bool = False

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_prompt_tokens": self.max_prompt_tokens, "keep_prompt": self.keep_prompt}

    def encode(self, row: Row) -> Sequence[EncodedRow]:
        return [self.encode_prompt(row)]

    def encode_prompt(self, row: Row) -> EncodedRow:
        """Raises DataError for a row that cannot be rendered."""
        dataset = self.dataset
        text = self._render(row)
        kept = None if self.keep_prompt else dataset.prompt_column
        columns = {name: value for name, value in row.values.items() if name != kept}
        if dataset.reward:
            columns["reward"] = dataset.reward
        token_ids = self.special.token_ids(text)
        return EncodedRow(
            text=self.special.shown(text),
            token_ids=token_ids,
            label=str(row.values[dataset.label_column]),
            metadata=columns,
            prompt_tokens=len(token_ids),
            special_text=self.hides and self.special.found_in(row.values),
            too_long=len(token_ids) > self.max_prompt_tokens,
        )

    def _render(self, row: Row) -> str:
        dataset = self.dataset
        prompt = self.special.prepared(row.values[dataset.prompt_column], row.place, self.hides)
        if isinstance(prompt, str) and dataset.prompt_template:
            prompt = _fill(dataset.prompt_template, {"prompt": prompt}, row.place)
        if not dataset.apply_chat_template:
            if not isinstance(prompt, str):
                raise DataError(f"{row.place}: the prompt is a list of messages; set apply_chat_template to true")
            return prompt
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [template_message(message) for message in given]
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{row.place}: the last message of the prompt is the assistant's, which the policy is to write; "
                "leave it out"
            )
        return render_chat(messages, self.tokenizer, row.place, True, self.chat_shown(row))


_PANIC = "PanicException"
"""What a library of Rust raises when it fails; it is no Exception."""


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of the model folder or hub model `path`. Raises ModelError when there is none."""
    folder = model_folder(path)
    # Without any of these, transformers makes an empty tokenizer and says nothing.
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise ModelError(f"{path}: no tokenizer in this model folder; put one of {', '.join(_TOKENIZER_FILES)} there")
    loader = auto_tokenizer()
    try:
        tokenizer = loader.from_pretrained(folder, trust_remote_code=False)
        tokenizer("a")  # some wrong settings are met only in use
    except BaseException as error:  # transformers and tokenizers raise many unrelated types for damaged files
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise ModelError(f"{path}: no tokenizer can be loaded from this model folder: {first_line(error)}") from None
    rows, largest = describe_model(folder).vocab_size, max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise ModelError(
            f"{path}: the tokenizer has token {largest}, but config.json gives the model {rows} rows (vocab_size): "
            "take both from one folder"
        )
    return tokenizer


def load_prompts(
    datasets: Sequence[DatasetConfig],
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    skip_bad_rows: bool,
    preparation: Preparation = Preparation(),
    keep_prompt: bool = False,
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> PromptSet:
    """Prompts of all `datasets`, concatenated. keep_prompt: their metadata holds the prompt column as it is.
    template_arguments: what the chat template is given beside messages and tools.

    Raises DataError for a bad row or when nothing is short enough.
    """
    check_template_arguments(tokenizer, template_arguments)
    encoders = [
        PromptEncoder(dataset, tokenizer, True, dict(template_arguments), max_prompt_tokens, keep_prompt)
        for dataset in datasets
    ]
    parts = [(encoder.dataset, map_rows(encoder, preparation)) for encoder in encoders]
    for dataset, rows in parts:
        check_usable(dataset, rows, skip_bad_rows)
    prompts, counts = PromptTable(parts), RowCounts.of(parts)
    if not len(prompts):
        names = ", ".join(dataset.name for dataset in datasets)
        if not counts.too_long:
            raise DataError(
                f"data sets {names}: no usable row is left; the first was skipped for: {counts.first_problem}"
            )
        raise DataError(
            f"data sets {names}: all {counts.too_long} prompts are longer than data.max_prompt_tokens = "
            f"{max_prompt_tokens}"
        )
    return PromptSet(prompts, counts)


def check_usable(dataset: DatasetConfig, rows: MappedRows, skip_bad_rows: bool) -> None:
    """Raise DataError for the first bad row, unless such rows are skipped, and where all are malformed."""
    rows.check(skip_bad_rows)
    if rows.malformed == rows.count:
        raise DataError(f"data set {dataset.name!r} ({dataset.path}): no usable row is left of {rows.count}")


class _Columns(string.Formatter):
    """Puts in text and numbers as they are; nothing else has one way to be written."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(
                f"a column holds {'null' if value is None else type(value).__name__}, not text or a number"
            )
        return str(value)


def _fill(template: str, values: Mapping[str, Any], place: str) -> str:
    try:
        return _Columns().vformat(template, (), values)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{place}: the template {template!r} cannot be filled: {error!r}") from None


def fill_from_row(template: str, prompt: Prompt, special: SpecialText | None = None) -> str:
    """`template` with the columns of the prompt's row; with `special`, their text of special tokens is hidden."""
    values = {"label": prompt.label, **prompt.metadata}
    if special is not None:
        values = special.prepared(values, prompt.prompt_id)
    return _fill(template, values, prompt.prompt_id)
