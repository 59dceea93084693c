"""What a run reads before it starts anything: model folder, tokenizer, prompts, graders."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rewards.chooser import GraderChooser
from rlpipe.config.base import template_fields
from rlpipe.config.root import Config
from rlpipe.data import PromptSet, load_prompts
from rlpipe.data.mapped_rows import Preparation
from rlpipe.data.prompts import fill_from_row, load_tokenizer
from rlpipe.generation.engine_checks import check_engines
from rlpipe.generation.episode_makers import EpisodeMaker, episode_maker
from rlpipe.generation.filters import GroupFilter, group_filters
from rlpipe.model.config_file import read_json_object
from rlpipe.model.hub import model_folder, pinned
from rlpipe.model.weight_checks import check_files
from rlpipe.prepare import kept_though_different, prepare
from rlpipe.shared.errors import DataError, ModelError
from rlpipe.shared.regular_file import check_regular
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    """Checked inputs.

    `config`: with the commits of models of the hub; `made`: folders that were made from the seed; `notes`: what the
    user should know of the rows.
    """

    config: Config
    made: tuple[Path, ...]
    tokenizer: "PreTrainedTokenizerBase"
    training: PromptSet
    evaluation: Mapping[str, Sequence[Prompt]]
    notes: tuple[str, ...]
    chooser: GraderChooser
    episodes: EpisodeMaker
    filters: tuple[GroupFilter, ...]

    @property
    def summary(self) -> str:
        """What a dry run tells."""
        held_out = ", ".join(f"{name} {len(prompts)}" for name, prompts in self.evaluation.items()) or "none"
        rollout = self.config.rollout
        return (
            f"configuration, model folder, data and graders are fine: {self.config.run.iterations} iterations of "
            f"{rollout.prompts_per_iteration} x {rollout.samples_per_prompt} samples from "
            f"{len(self.training.prompts)} training prompts; evaluation prompts: {held_out}"
            + "".join(f"\n{note}" for note in self.notes)
        )


def load_inputs(config: Config) -> Inputs:
    """Make what `prepare` asks for, then read everything. Raises RlpipeError for whatever is wrong with it."""
    made = tuple(prepare(config))
    config = with_pinned_models(config)
    _check_model_folder(config)
    check_engines(config)
    tokenizer = load_tokenizer(config.model.path)
    data = config.data
    preparation = Preparation(data.cache_directory, data.processes)
    shared = (
        tokenizer,
        data.max_prompt_tokens,
        data.skip_bad_rows,
        preparation,
        config.rollout.generate.needs_rows,
        data.chat_template_arguments,
    )
    training = load_prompts(data.train, *shared)
    evaluation = {dataset.name: load_prompts([dataset], *shared) for dataset in config.eval.datasets}
    chooser = GraderChooser(config.reward, [*data.train, *config.eval.datasets])
    for prompts in (training, *evaluation.values()):
        # Without a column that names graders, the rows of a data set have the same one.
        for prompt in prompts.prompts if config.reward.column else prompts.prompts.firsts():
            chooser.choose(prompt)
    if config.warm_start and set(template_fields(config.warm_start.response_template)) != {"label"}:
        for prompt in training.prompts:
            fill_from_row(config.warm_start.response_template, prompt)
    return Inputs(
        config=config,
        made=made,
        tokenizer=tokenizer,
        training=training,
        evaluation={name: prompts.prompts for name, prompts in evaluation.items()},
        notes=tuple(_notes(config, training, evaluation)),
        chooser=chooser,
        episodes=episode_maker(config),
        filters=group_filters(config.rollout.filters),
    )


def with_pinned_models(config: Config) -> Config:
    """`config` with models that every process, and every later command from any folder, finds again: a folder by its
    absolute path, a name of the hub with the commit that it means now, downloaded where it is not there yet.
    """
    reference = config.model.reference_path
    paths = {"path": pinned(config.model.path), "reference_path": pinned(reference) if reference else None}
    return config.model_copy(update={"model": config.model.model_copy(update=paths)})


def _notes(config: Config, training: PromptSet, evaluation: Mapping[str, PromptSet]) -> Iterator[str]:
    """A sentence for each thing about policy and rows that the numbers of the run would not show.

    Raises DataError for an evaluation set that is part of the training data.
    """
    yield from kept_though_different(config)
    yield from training.rows.notes("the training data")
    for name, prompts in evaluation.items():
        yield from prompts.rows.notes(f"evaluation set {name}")
    trained = training.prompts.digests
    for name, prompts in evaluation.items():
        yield from shared_rows(name, prompts.prompts.digests, trained, "prompts", config.eval.allow_training_rows)


def shared_rows(
    name: str, evaluated: NDArray[np.int64], trained: NDArray[np.int64], what: str, allowed: bool
) -> Iterator[str]:
    """A sentence where some of the evaluation set `name` are trained, by digests of either; DataError where all are,
    unless that is `allowed`. what: `prompts` or `sequences`."""
    shared = int(np.count_nonzero(np.isin(evaluated, trained)))
    if shared == len(evaluated) and not allowed:
        raise DataError(
            f"evaluation set {name!r}: all its {shared} {what} are training {what} too, so it would not tell "
            "what was learned; give other rows, or set eval.allow_training_rows to true"
        )
    if shared:
        yield f"evaluation set {name}: {shared} of {len(evaluated)} {what} are training {what} too"


def _check_model_folder(config: Config) -> None:
    folder = model_folder(config.model.path)
    check_regular(folder.glob("*"))
    for file in (*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.jinja")):
        if not file.is_file():
            what = "a folder" if file.is_dir() else "a link to a file that is not there"
            raise ModelError(f"{file}: is {what}; put the file in its place, for instance by another download")
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise ModelError(
                f"{folder}: no {needed} in this model folder; set model.path to one in Hugging Face layout"
            )
    check_files(folder)
    generation = folder / "generation_config.json"  # SGLang reads it
    if generation.exists():
        read_json_object(generation)
