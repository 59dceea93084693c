"""From rows to supervised sequences: a prompt and its answer, or a whole conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlpipe.batching import supervised_sequence
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.data import DatasetConfig
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig
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
from rlpipe.data.prompts import PromptEncoder, check_usable, fill_from_row, message_list, render_chat
from rlpipe.data.rows import Row
from rlpipe.data.special_text import SpecialText
from rlpipe.shared.errors import DataError, ModelError
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase


class SequenceTable(JoinedRows[TrainingSequence]):
    """Sequences of data sets."""

    def make(self, dataset: DatasetConfig, rows: MappedRows, position: int) -> TrainingSequence:
        row = rows.row(position)
        tokens, prompt = row["token_ids"], row["prompt_tokens"]
        name = f"{dataset.name}/{rows.numbers[position]}"
        return supervised_sequence(name, tokens[:prompt], tokens[prompt:], row["loss_mask"])


@dataclass(frozen=True)
class Examples:
    """Sequences in file order, and what became of all rows."""

    sequences: SequenceTable
    rows: RowCounts

    @property
    def fingerprint(self) -> str:
        """Changes with any token or mask, and with their order."""
        return fingerprint_of(self.sequences.parts)


@dataclass(frozen=True)
class AnswerEncoder(PromptEncoder):
    """A row as a prompt and the answer made from it."""

    response_template: str = "{label}"
    max_sequence_tokens: int = 0

    @property
    def limits(self) -> Mapping[str, Any]:
        return {**super().limits, "template": self.response_template, "max_sequence_tokens": self.max_sequence_tokens}

    def encode(self, row: Row) -> EncodedRow:
        encoded = super().encode(row)
        prompt = Prompt(row.place, encoded.text, tuple(encoded.token_ids), encoded.label, "", encoded.metadata)
        special = None if self.dataset.allow_special_tokens else self.special
        answer = answer_token_ids(prompt, self.response_template, self.tokenizer, special)
        tokens = [*prompt.token_ids, *answer]
        too_long = encoded.too_long or len(tokens) > self.max_sequence_tokens
        mask = [1] * len(answer)
        return replace(encoded, token_ids=tokens, loss_mask=mask, metadata={}, too_long=too_long)


@dataclass(frozen=True)
class ConversationEncoder(RowEncoder):
    """A row as a conversation."""

    max_sequence_tokens: int = 0

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_sequence_tokens": self.max_sequence_tokens}

    def encode(self, row: Row) -> EncodedRow:
        messages: Any = message_list(row.values[self.dataset.prompt_column], row.place)
        hides = not self.dataset.allow_special_tokens
        special_text = hides and self.special.found_in(messages)
        shown = self.special.prepared(messages, row.place, hides)
        prompt_ids, answer_ids, mask = conversation_token_ids(row.place, shown, self.tokenizer, self.special)
        if not prompt_ids:
            raise DataError(f"{row.place}: nothing stands before the first answer: give it a prompt")
        return EncodedRow(
            text="",
            token_ids=[*prompt_ids, *answer_ids],
            loss_mask=mask,
            prompt_tokens=len(prompt_ids),
            special_text=special_text,
            too_long=len(prompt_ids) + len(answer_ids) > self.max_sequence_tokens,
        )


def load_examples(config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer") -> Examples:
    """All training rows as sequences. Raises DataError for a bad row or when nothing is short enough."""
    data = config.data
    preparation = Preparation(data.cache_directory, data.processes)
    parts = [(one, map_rows(_encoder(one, config, settings, tokenizer), preparation)) for one in data.train]
    for dataset, rows in parts:
        check_usable(dataset, rows, data.skip_bad_rows)
    kept, counts = SequenceTable(parts), RowCounts.of(parts)
    if not len(kept):
        if not counts.too_long:
            raise DataError(f"no usable row is left; the first was skipped for: {counts.first_problem}")
        limit = f"sft.max_sequence_tokens = {settings.max_sequence_tokens}"
        prompts = "" if settings.conversations else f", or their prompts than {data.max_prompt_tokens} tokens"
        raise DataError(f"all {counts.too_long} sequences are longer than {limit}{prompts}")
    return Examples(kept, counts)


def _encoder(dataset: DatasetConfig, config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer") -> RowEncoder:
    if settings.conversations:
        return ConversationEncoder(
            dataset, tokenizer, with_label=False, max_sequence_tokens=settings.max_sequence_tokens
        )
    return AnswerEncoder(
        dataset,
        tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        response_template=settings.response_template,
        max_sequence_tokens=settings.max_sequence_tokens,
    )


def answer_sequence(
    prompt: Prompt, response_template: str, tokenizer: "Tokenizer", special: SpecialText | None = None
) -> TrainingSequence:
    """The prompt, then the answer made from its row, then the end-of-sequence token; the answer is trained.

    special: text of special tokens in the row stays text; without it, it becomes those tokens.
    """
    answer = answer_token_ids(prompt, response_template, tokenizer, special)
    return supervised_sequence(prompt.prompt_id, prompt.token_ids, answer)


def answer_token_ids(
    prompt: Prompt, response_template: str, tokenizer: "Tokenizer", special: SpecialText | None
) -> list[int]:
    """The answer of `answer_sequence`, with the end-of-sequence token."""
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path} has no end-of-sequence token; give it one")
    text = fill_from_row(response_template, prompt, special)
    answer = special.token_ids(text) if special else tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*answer, tokenizer.eos_token_id]


def conversation_token_ids(
    place: str, messages: Sequence[Mapping[str, Any]], tokenizer: "Tokenizer", special: SpecialText
) -> tuple[list[int], list[int], list[int]]:
    """What comes before the first answer, everything from there on, and which of that is trained (1, 0): what the
    assistant says in a conversation as the chat template renders it.

    In `messages`, text of special tokens is hidden where it is to stay text. Raises DataError when no turn is the
    assistant's, or when the template rewrites earlier turns as later ones come.
    """
    segments: list[tuple[str, int]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(messages[:index], tokenizer, place, add_generation_prompt=True)
        after = render_chat(messages[: index + 1], tokenizer, place, add_generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise DataError(f"{place}: the chat template rewrites earlier turns, so turns cannot be trained apart")
        segments += [(before[len(done) :], 0), (after[len(before) :], 1)]
        done = after
    if not segments:
        raise DataError(f"{place}: the conversation has no assistant turn to train on")
    pieces = [(special.token_ids(text), trained) for text, trained in segments]
    (prompt_ids, _), *rest = pieces
    answer_ids = [token for ids, _ in rest for token in ids]
    answer_mask = [trained for ids, trained in rest for _ in ids]
    return prompt_ids, answer_ids, answer_mask
