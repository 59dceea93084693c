"""The policy of a checkpoint as a folder in Hugging Face layout, by one process on a CPU."""

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from actor import distributed
from actor.checkpoint import READ_ERRORS, error_summary, sharding_metadata
from actor.hf.policy_folder import save_hf
from actor.megatron_patches.optimizer_fixes import install_optimizer_fixes
from actor.models.build_model import build_model
from actor.models.policy_model import PolicyModel
from actor.runtime import install_megatron_runtime
from rlpipe.config.actor import ActorConfig, ParallelConfig, RecomputeConfig
from rlpipe.model.model_reader import trainable_model
from rlpipe.shared.errors import CheckpointError
from rlpipe.shared.policy_facts import PolicyFacts

_SECONDS = 60.0  # for a process to meet itself


def export_checkpoint(checkpoint: Path, output: Path, source: Path, actor: ActorConfig, facts: PolicyFacts) -> None:
    """Write `output` from `checkpoint`, whatever layout saved it. Needs the policy's size in host memory.

    Of the checkpoint only the policy is read, every byte once. source: the model folder that the run began with. Call
    it in a process that sees no GPU and does nothing else: Megatron is patched for a CPU there.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model. ModelError: `source` is.
    """
    install_megatron_runtime()
    install_optimizer_fixes()  # a checkpoint names their classes
    whole = actor.model_copy(
        update={
            "processes": 1,
            "parallel": ParallelConfig(),
            "recompute": RecomputeConfig(),
            "gdn_backend": "torch",
        }
    )
    store = distributed.open_store("127.0.0.1", 1, _SECONDS)
    distributed.join_processes(store, 0, 1, _SECONDS)
    try:
        distributed.start_model_parallel(whole, seed=0)
        description = trainable_model(source)
        (chunk,) = build_model(description, whole)
        _load(chunk, checkpoint)
        save_hf([chunk], description, output, source, facts)
    finally:
        distributed.leave()


def _load(chunk: PolicyModel, checkpoint: Path) -> None:
    try:
        content: dict[str, Any] = {"model": chunk.sharded_state_dict(metadata=sharding_metadata())}
        loaded = dist_checkpointing.load(content, str(checkpoint))
    except READ_ERRORS as error:
        raise CheckpointError(f"{checkpoint} cannot be read ({error_summary(error)}): use another one") from error
    chunk.load_state_dict(loaded["model"], strict=True)
