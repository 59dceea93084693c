"""What a run reads before it starts anything: model folder, tokenizer, prompts, graders."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rewards.chooser import GraderChooser
from rlpipe.config.root import Config
from rlpipe.data import PromptSet, load_prompts
from rlpipe.data.prompts import load_tokenizer
from rlpipe.generation.filters import GroupFilter, group_filters
from rlpipe.generation.generate_functions import GenerateFunction, generate_function
from rlpipe.model.hf_config import load_model_shape
from rlpipe.model.hub import model_folder, pinned
from rlpipe.prepare import prepare
from rlpipe.shared.errors import ModelError
from rlpipe.shared.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    """Checked inputs. `config`: with the commits of models of the hub; `made`: folders that were made from the seed."""

    config: Config
    made: tuple[Path, ...]
    tokenizer: "PreTrainedTokenizerBase"
    training: PromptSet
    evaluation: Mapping[str, tuple[Prompt, ...]]
    chooser: GraderChooser
    generate: GenerateFunction
    filters: tuple[GroupFilter, ...]

    @property
    def summary(self) -> str:
        """What a dry run tells."""
        held_out = ", ".join(f"{name} {len(prompts)}" for name, prompts in self.evaluation.items()) or "none"
        rollout = self.config.rollout
        return (
            f"configuration, model folder, data and graders are fine: {self.config.run.iterations} iterations of "
            f"{rollout.prompts_per_iteration} x {rollout.samples_per_prompt} samples from "
            f"{len(self.training.prompts)} training prompts ({self.training.too_long} too long, "
            f"{self.training.rows_skipped} bad rows skipped); evaluation prompts: {held_out}"
        )


def load_inputs(config: Config) -> Inputs:
    """Make what `prepare` asks for, then read everything. Raises RlpipeError for whatever is wrong with it."""
    made = tuple(prepare(config))
    config = with_pinned_models(config)
    _check_model_folder(config)
    load_model_shape(config.model.path)
    tokenizer = load_tokenizer(config.model.path)
    data = config.data
    training = load_prompts(data.train, tokenizer, data.max_prompt_tokens, data.skip_bad_rows)
    evaluation = {
        dataset.name: load_prompts([dataset], tokenizer, data.max_prompt_tokens, data.skip_bad_rows).prompts
        for dataset in config.eval.datasets
    }
    return Inputs(
        config=config,
        made=made,
        tokenizer=tokenizer,
        training=training,
        evaluation=evaluation,
        chooser=GraderChooser(config.reward, [*data.train, *config.eval.datasets]),
        generate=generate_function(config.rollout.generate),
        filters=group_filters(config.rollout.filters),
    )


def with_pinned_models(config: Config) -> Config:
    """`config` with the commits that names of hub models mean now, downloaded where they are not there yet."""
    reference = config.model.reference_path
    paths = {"path": pinned(config.model.path), "reference_path": pinned(reference) if reference else None}
    return config.model_copy(update={"model": config.model.model_copy(update=paths)})


def _check_model_folder(config: Config) -> None:
    folder = model_folder(config.model.path)
    for needed in ("config.json", "*.safetensors"):
        if not any(folder.glob(needed)):
            raise ModelError(
                f"{folder}: no {needed} in this model folder; set model.path to one in Hugging Face layout"
            )
