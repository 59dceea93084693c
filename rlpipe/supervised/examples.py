"""From rows to supervised sequences: a prompt and its answer, or a whole conversation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpipe.batching import supervised_sequence
from rlpipe.batching.sequences import TrainingSequence
from rlpipe.config.data import DatasetConfig
from rlpipe.config.root import Config
from rlpipe.config.supervised import SupervisedConfig
from rlpipe.data import load_prompts
from rlpipe.data.prompts import fill_from_row, message_list
from rlpipe.data.rows import load_rows
from rlpipe.shared.errors import DataError
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


def load_examples(config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer") -> Examples:
    """All training rows as sequences. Raises DataError for a bad row or when nothing is short enough."""
    build = _from_conversations if settings.conversations else _from_prompts
    sequences, too_long, skipped = build(config, settings, tokenizer)
    kept = tuple(sequence for sequence in sequences if sequence.tokens <= settings.max_sequence_tokens)
    if not kept:
        raise DataError(
            f"all {len(sequences)} sequences are longer than sft.max_sequence_tokens = {settings.max_sequence_tokens}"
        )
    return Examples(kept, too_long + len(sequences) - len(kept), skipped)


def answer_sequence(prompt: Prompt, response_template: str, tokenizer: "Tokenizer") -> TrainingSequence:
    """The prompt, then the answer made from its row, then the end-of-sequence token; the answer is trained."""
    answer = tokenizer(fill_from_row(response_template, prompt), add_special_tokens=False)["input_ids"]
    return supervised_sequence(prompt.prompt_id, prompt.token_ids, [*answer, tokenizer.eos_token_id])


def conversation_sequence(
    sequence_id: str, messages: Sequence[Mapping[str, Any]], tokenizer: "Tokenizer"
) -> TrainingSequence:
    """A conversation as the chat template renders it; what the assistant says is trained.

    Raises DataError when no turn is the assistant's, or when the template rewrites earlier turns as later ones come.
    """
    segments: list[tuple[str, int]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:index], tokenizer, add_generation_prompt=True)
        after = _render(messages[: index + 1], tokenizer, add_generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise DataError(
                f"{sequence_id}: the chat template rewrites earlier turns, so turns cannot be trained apart"
            )
        segments += [(before[len(done) :], 0), (after[len(before) :], 1)]
        done = after
    if not segments:
        raise DataError(f"{sequence_id}: the conversation has no assistant turn to train on")
    pieces = [(tokenizer(text, add_special_tokens=False)["input_ids"], trained) for text, trained in segments]
    (prompt_ids, _), *rest = pieces
    answer_ids = [token for ids, _ in rest for token in ids]
    answer_mask = [trained for ids, trained in rest for _ in ids]
    return supervised_sequence(sequence_id, prompt_ids, answer_ids, answer_mask)


def _from_prompts(
    config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer"
) -> tuple[list[TrainingSequence], int, int]:
    data = config.data
    prompts = load_prompts(data.train, tokenizer, data.max_prompt_tokens, data.skip_bad_rows)
    sequences = [answer_sequence(prompt, settings.response_template, tokenizer) for prompt in prompts.prompts]
    return sequences, prompts.too_long, prompts.rows_skipped


def _from_conversations(
    config: Config, settings: SupervisedConfig, tokenizer: "Tokenizer"
) -> tuple[list[TrainingSequence], int, int]:
    sequences: list[TrainingSequence] = []
    skipped = 0
    for dataset in config.data.train:
        loaded = load_rows(_without_label(dataset), config.data.skip_bad_rows)
        skipped += loaded.skipped
        for index, row in enumerate(loaded.rows):
            messages = message_list(row.values[dataset.prompt_column], row.place)
            sequences.append(conversation_sequence(f"{dataset.name}/{index}", messages, tokenizer))
    return sequences, 0, skipped


def _without_label(dataset: DatasetConfig) -> DatasetConfig:
    """A conversation holds its own answers, so the label column is not asked for."""
    return dataset.model_copy(update={"label_column": dataset.prompt_column})


def _render(messages: Sequence[Mapping[str, Any]], tokenizer: "Tokenizer", add_generation_prompt: bool) -> str:
    turns = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt))
