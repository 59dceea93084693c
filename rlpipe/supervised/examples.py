"""From rows to supervised sequences: a prompt and its answer, or a whole conversation."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.batching import PackLimits, supervised_sequence
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.data import DatasetConfig
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig
from rlpipe.data.chat_messages import template_message
from rlpipe.data.chat_template import (
    ChatShown,
    check_template_arguments,
    render_chat,
    turn_left_out,
)
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
from rlpipe.data.prompts import PromptEncoder, check_usable, fill_from_row
from rlpipe.data.rows import Row
from rlpipe.data.special_text import SpecialText
from rlpipe.shared.errors import DataError, ModelError
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase

_SHOWN_CHARACTERS = 40


class SequenceTable(JoinedRows[TrainingSequence]):
    """Sequences of data sets."""

    def make(self, dataset: DatasetConfig, rows: MappedRows, position: int) -> TrainingSequence:
        row = rows.row(position)
        tokens, prompt = row["token_ids"], row["prompt_tokens"]
        part = rows.parts[position]
        name = f"{dataset.name}/{rows.numbers[position]}" + (f".{part}" if part else "")
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

    @property
    def digests(self) -> NDArray[np.int64]:
        """A number for each sequence, equal where tokens and masks are."""
        return np.concatenate([rows.contents for _, rows in self.sequences.parts])


@dataclass(frozen=True)
class AnswerEncoder(PromptEncoder):
    """A row as a prompt and the answer made from it."""

    response_template: str = "{label}"
    max_sequence_tokens: int = 0

    @property
    def limits(self) -> Mapping[str, Any]:
        return {**super().limits, "template": self.response_template, "max_sequence_tokens": self.max_sequence_tokens}

    def encode(self, row: Row) -> Sequence[EncodedRow]:
        encoded = self.encode_prompt(row)
        prompt = Prompt(row.place, encoded.text, tuple(encoded.token_ids), encoded.label, "", encoded.metadata)
        answer = answer_token_ids(prompt, self.response_template, self.tokenizer, self.special if self.hides else None)
        tokens = [*prompt.token_ids, *answer]
        too_long = encoded.too_long or len(tokens) > self.max_sequence_tokens
        mask = [1] * len(answer)
        return [replace(encoded, token_ids=tokens, loss_mask=mask, metadata={}, too_long=too_long)]


@dataclass(frozen=True)
class Turn:
    """What the assistant says, as the chat template renders it where it is the last to speak. `before`: all up to where
    the policy writes; `after`: that, and the turn."""

    before: str
    after: str


@dataclass(frozen=True)
class ConversationEncoder(RowEncoder):
    """A row as a conversation: one sequence, or several where the chat template rewrites earlier turns."""

    max_sequence_tokens: int = 0

    @property
    def limits(self) -> Mapping[str, Any]:
        return {"max_sequence_tokens": self.max_sequence_tokens}

    def encode(self, row: Row) -> Sequence[EncodedRow]:
        values: Any = row.values[self.dataset.prompt_column]
        if isinstance(values, str):
            raise DataError(
                f"{row.place}: column {self.dataset.prompt_column!r} is text, and sft.conversations needs messages"
            )
        shown = [values, row.values[self.dataset.tools_column] if self.dataset.tools_column else None]
        special_text = self.hides and self.special.found_in(shown)
        messages = [template_message(one) for one in self.special.prepared(values, row.place, self.hides)]
        turns = assistant_turns(messages, self, row.place, self.chat_shown(row))
        return [replace(self._sequence(one, row.place), special_text=special_text) for one in joined_turns(turns)]

    def _sequence(self, turns: Sequence[Turn], place: str) -> EncodedRow:
        prompt_ids = self.special.token_ids(turns[0].before)
        if not prompt_ids:
            raise DataError(f"{place}: nothing stands before the first answer: give it a prompt")
        token_ids, mask, written = list(prompt_ids), [0] * len(prompt_ids), turns[0].before
        for turn in turns:
            for text, trained in ((turn.before[len(written) :], 0), (turn.after[len(turn.before) :], 1)):
                pieces = self.special.token_ids(text)
                trained_tokens = _up_to_last(pieces, self.tokenizer.eos_token_id) if trained else 0
                token_ids += pieces
                mask += [1] * trained_tokens + [0] * (len(pieces) - trained_tokens)
            written = turn.after
        return EncodedRow(
            text="",
            token_ids=token_ids,
            loss_mask=mask[len(prompt_ids) :],
            prompt_tokens=len(prompt_ids),
            too_long=len(token_ids) > self.max_sequence_tokens,
        )


def load_examples(
    config: Config,
    settings: SupervisedConfig,
    tokenizer: "Tokenizer",
    datasets: Sequence[DatasetConfig] | None = None,
) -> Examples:
    """All rows of `datasets`, those that are trained where it is None, as sequences.

    Raises DataError for a bad row or when nothing is short enough.
    """
    data = config.data
    check_template_arguments(tokenizer, data.chat_template_arguments)
    preparation = Preparation(data.cache_directory, data.processes)
    parts = [(one, map_rows(_encoder(one, config, settings, tokenizer), preparation)) for one in datasets or data.train]
    for dataset, rows in parts:
        check_usable(dataset, rows, data.skip_bad_rows)
    kept, counts = SequenceTable(parts), RowCounts.of(parts)
    if not len(kept):
        if not counts.too_long:
            raise DataError(f"no usable row is left; the first was skipped for: {counts.first_problem}")
        most = _most_tokens(config, settings)
        limit = f"sft.max_sequence_tokens = {most}"
        if most < settings.max_sequence_tokens:
            limit = f"a pack of {most} tokens (actor.max_tokens_per_gpu)"
        prompts = "" if settings.conversations else f", or their prompts than {data.max_prompt_tokens} tokens"
        raise DataError(f"all {counts.too_long} sequences are longer than {limit}{prompts}")
    return Examples(kept, counts)


def _encoder(dataset: DatasetConfig, config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer") -> RowEncoder:
    if settings.conversations:
        return ConversationEncoder(
            dataset,
            tokenizer,
            with_label=False,
            template_arguments=config.data.chat_template_arguments,
            max_sequence_tokens=_most_tokens(config, settings),
        )
    return AnswerEncoder(
        dataset,
        tokenizer,
        template_arguments=config.data.chat_template_arguments,
        max_prompt_tokens=config.data.max_prompt_tokens,
        response_template=settings.response_template,
        max_sequence_tokens=_most_tokens(config, settings),
    )


def _most_tokens(config: Config, settings: SupervisedConfig) -> int:
    """Of a sequence: where packs hold whole ones, what is longer than a pack would be left out of every step."""
    if settings.packing == "wrapped":
        return settings.max_sequence_tokens
    limits = (PackLimits.training(config.actor), PackLimits.forward_only(config.actor))
    return min(settings.max_sequence_tokens, *(one.capacity_tokens for one in limits))


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


def assistant_turns(
    messages: Sequence[Mapping[str, Any]], encoder: RowEncoder, place: str, shown: ChatShown
) -> list[Turn]:
    """The assistant's turns in a conversation, each as the policy would be asked for it and would write it.

    Raises DataError, naming `place`, where no turn is the assistant's, and where the template leaves out a part of one
    or begins it otherwise than it lets the policy begin.
    """
    tokenizer, special = encoder.tokenizer, encoder.special
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(messages[:index], tokenizer, place, add_generation_prompt=True, shown=shown)
        after = render_chat(messages[: index + 1], tokenizer, place, add_generation_prompt=False, shown=shown)
        if not after.startswith(before):
            same = len(os.path.commonprefix([before, after]))
            asked, written = (special.shown(text[same : same + _SHOWN_CHARACTERS]) for text in (before, after))
            raise DataError(
                f"{place}: the chat template of {tokenizer.name_or_path} has the policy begin message {index} after "
                f"{asked!r}, but writes {written!r} there; change the row, the template or "
                "data.chat_template_arguments"
            )
        if lost := turn_left_out(message, after[len(before) :]):
            raise DataError(
                f"{place}: the chat template of {tokenizer.name_or_path} leaves out {lost} in message {index}; change "
                "the row, the template or data.chat_template_arguments"
            )
        turns.append(Turn(before, after))
    if not turns:
        raise DataError(f"{place}: the conversation has no assistant turn to train on")
    return turns


def joined_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns that can be trained in one sequence: each begins with all that the one before it ended with. Templates that
    cut the reasoning out of earlier turns begin another with every question."""
    joined: list[list[Turn]] = []
    for turn in turns:
        if joined and turn.before.startswith(joined[-1][-1].after):
            joined[-1].append(turn)
        else:
            joined.append([turn])
    return joined


def _up_to_last(token_ids: Sequence[int], token: int | None) -> int:
    """How many tokens there are up to the last `token`; all where there is none."""
    return next((end for end in range(len(token_ids), 0, -1) if token_ids[end - 1] == token), len(token_ids))
