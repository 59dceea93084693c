"""From rows to supervised sequences: a prompt and its answer, or a whole conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from rlpipe.batching import supervised_sequence
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig
from rlpipe.data import load_prompts
from rlpipe.data.prompts import fill_from_row, message_list, render_chat
from rlpipe.data.rows import load_rows
from rlpipe.data.special_text import SpecialText
from rlpipe.shared.errors import DataError, ModelError
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase


@dataclass(frozen=True)
class Examples:
    """Sequences in file order, with counts of what was left out."""

    sequences: tuple[TrainingSequence, ...]
    too_long: int
    rows_skipped: int
    special_text_rows: int = 0

    @cached_property
    def fingerprint(self) -> str:
        """Changes with any token or its mask, and with the order of sequences."""
        digest = xxhash.xxh3_64()
        for sequence in self.sequences:
            digest.update(f"{sequence.sequence_id} {sequence.tokens}\n".encode())
            digest.update(np.ascontiguousarray(sequence.token_ids).tobytes())
            digest.update(np.ascontiguousarray(sequence.loss_mask).tobytes())
        return digest.hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the rows."""
        if not self.special_text_rows:
            return ()
        return (
            f"the training data: {self.special_text_rows} rows hold text of special tokens, which stays text "
            "(allow_special_tokens makes tokens of it)",
        )


@dataclass
class _Built:
    """Sequences so far, with counts of what was left out."""

    sequences: list[TrainingSequence] = field(default_factory=list)
    too_long: int = 0
    skipped: int = 0
    special_rows: int = 0


def load_examples(config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer") -> Examples:
    """All training rows as sequences. Raises DataError for a bad row or when nothing is short enough."""
    special = SpecialText(tokenizer)
    build = _from_conversations if settings.conversations else _from_prompts
    built = build(config, settings, tokenizer, special)
    sequences = built.sequences
    kept = tuple(sequence for sequence in sequences if sequence.tokens <= settings.max_sequence_tokens)
    if not sequences:
        raise DataError(f"no usable row is left; {built.skipped} were skipped (data.skip_bad_rows)")
    if not kept:
        raise DataError(
            f"all {len(sequences)} sequences are longer than sft.max_sequence_tokens = {settings.max_sequence_tokens}"
        )
    too_long = built.too_long + len(sequences) - len(kept)
    return Examples(kept, too_long, built.skipped, built.special_rows)


def answer_sequence(
    prompt: Prompt, response_template: str, tokenizer: "Tokenizer", special: SpecialText | None = None
) -> TrainingSequence:
    """The prompt, then the answer made from its row, then the end-of-sequence token; the answer is trained.

    special: text of special tokens in the row stays text; without it, it becomes those tokens.
    """
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer {tokenizer.name_or_path} has no end-of-sequence token; give it one")
    text = fill_from_row(response_template, prompt, special)
    answer = special.token_ids(text) if special else tokenizer(text, add_special_tokens=False)["input_ids"]
    return supervised_sequence(prompt.prompt_id, prompt.token_ids, [*answer, tokenizer.eos_token_id])


def conversation_sequence(
    sequence_id: str, messages: Sequence[Mapping[str, Any]], tokenizer: "Tokenizer", special: SpecialText | None = None
) -> TrainingSequence:
    """A conversation as the chat template renders it; what the assistant says is trained.

    In `messages`, text of special tokens is hidden where it is to stay text.

    Raises DataError when no turn is the assistant's, or when the template rewrites earlier turns as later ones come.
    """
    segments: list[tuple[str, int]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(messages[:index], tokenizer, sequence_id, add_generation_prompt=True)
        after = render_chat(messages[: index + 1], tokenizer, sequence_id, add_generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise DataError(
                f"{sequence_id}: the chat template rewrites earlier turns, so turns cannot be trained apart"
            )
        segments += [(before[len(done) :], 0), (after[len(before) :], 1)]
        done = after
    if not segments:
        raise DataError(f"{sequence_id}: the conversation has no assistant turn to train on")
    special = special or SpecialText(tokenizer)
    pieces = [(special.token_ids(text), trained) for text, trained in segments]
    (prompt_ids, _), *rest = pieces
    answer_ids = [token for ids, _ in rest for token in ids]
    answer_mask = [trained for ids, trained in rest for _ in ids]
    return supervised_sequence(sequence_id, prompt_ids, answer_ids, answer_mask)


def _from_prompts(config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer", special: SpecialText) -> _Built:
    data = config.data
    prompts = load_prompts(data.train, tokenizer, data.max_prompt_tokens, data.skip_bad_rows)
    built = _Built(too_long=prompts.too_long, skipped=prompts.rows_skipped, special_rows=prompts.special_text_rows)
    hides = {dataset.name: None if dataset.allow_special_tokens else special for dataset in data.train}
    for prompt in prompts.prompts:
        sequence = answer_sequence(prompt, settings.response_template, tokenizer, hides[prompt.dataset])
        built.sequences.append(sequence)
    return built


def _from_conversations(
    config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer", special: SpecialText
) -> _Built:
    built = _Built()
    for dataset in config.data.train:
        loaded = load_rows(dataset, config.data.skip_bad_rows, with_label=False)
        built.skipped += loaded.skipped
        for index, row in enumerate(loaded.rows):
            messages: Any = message_list(row.values[dataset.prompt_column], row.place)
            hide = not dataset.allow_special_tokens
            built.special_rows += hide and special.found_in(messages)
            try:
                messages = special.prepared(messages, row.place, hide)
                sequence = conversation_sequence(f"{dataset.name}/{index}", messages, tokenizer, special)
            except DataError as error:
                if not config.data.skip_bad_rows:
                    raise DataError(f"{row.place}: {error}") from None
                built.skipped += 1
                continue
            built.sequences.append(sequence)
    return built
