"""The policy of a checkpoint as a folder in Hugging Face layout, by one process on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from actor import distributed
from actor.checkpoint import READ_ERRORS, error_summary, load_trained, sharding_metadata, trained_content
from actor.hf.adapter_modules import install_adapters, pack_base
from actor.hf.adapter_weights import save_adapters
from actor.hf.load_weights import load_hf
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

    Of the checkpoint only the policy is read, every byte once, and where it holds adapters the model that they are
    merged with. source: the model folder that the run began with. Call it in a process that sees no GPU and does
    nothing else: Megatron is patched for a CPU there.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model. ModelError: `source` is.
    """
    with _restored(checkpoint, source, actor) as chunk:
        if actor.lora is not None:
            load_hf([chunk], chunk.description, source)
            pack_base([chunk], actor.lora)
        save_hf([chunk], chunk.description, output, source, facts)


def export_adapters(
    checkpoint: Path, output: Path, source: Path, actor: ActorConfig, facts: PolicyFacts, base: str
) -> None:
    """Write the adapters of `checkpoint` in PEFT's layout; as `export_checkpoint` otherwise.

    base: the model that they belong to, as others find it.
    """
    assert actor.lora is not None
    with _restored(checkpoint, source, actor) as chunk:
        save_adapters([chunk], actor.lora, output, base, facts)


@contextmanager
def _restored(checkpoint: Path, source: Path, actor: ActorConfig) -> Iterator[PolicyModel]:
    """The policy, built in this process alone, with what `checkpoint` holds of it."""
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
        (chunk,) = build_model(trainable_model(source), whole)
        if actor.lora is not None:
            install_adapters([chunk], actor.lora)
        _load(chunk, checkpoint)
        yield chunk
    finally:
        distributed.leave()


def _load(chunk: PolicyModel, checkpoint: Path) -> None:
    try:
        content: dict[str, Any] = {"model": trained_content(chunk, sharding_metadata())}
        loaded = dist_checkpointing.load(content, str(checkpoint))
    except READ_ERRORS as error:
        raise CheckpointError(f"{checkpoint} cannot be read ({error_summary(error)}): use another one") from error
    load_trained(chunk, loaded["model"])
