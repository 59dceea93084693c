"""Saves and loads everything that training continues from, in any parallel layout (megatron dist_checkpointing)."""

import json
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from actor.background_writer import BackgroundWrite, WriterThreads, Written, save_strategy, use_thread_queue
from actor.hf.tensor_placement import ADAPTER
from actor.models.policy_model import PolicyModel
from actor.optimizer_content import optimizer_content, restore_step
from actor.parallel_reader import use_parallel_reader
from actor.reference import ReferenceWeights
from actor.train_report import UpdateCounts
from actor.trainer import Trainer
from rlpipe.model.weight_checks import weights_fingerprint
from rlpipe.shared.checkpoint_folder import checkpoint_path, damaged_files, partial_path, publish, read_state
from rlpipe.shared.errors import CheckpointError, DamagedCheckpointError

_WRITE_ERRORS = (CheckpointingException, CheckpointException, KeyError, OSError, RuntimeError, ValueError)
# What a damaged file makes the readers of torch and Megatron raise has nothing in common.
READ_ERRORS = (Exception, CheckpointException)

_SETTINGS = {
    "dtype": "actor.dtype",
    "train_mtp": "actor.train_mtp",
    "frozen_parameters": "actor.frozen_parameters",
    "reference": "algorithm.kl.coefficient and model.reference_path",
    "lora": "actor.lora",
    "base": "the weights in model.path",
}
_LORA_SETTINGS = {"rank", "alpha", "use_rslora", "targets", "experts", "base"}


class Checkpointer:
    """Collective: every process calls each method at the same point."""

    def __init__(self, trainer: Trainer, keep: int) -> None:
        self._trainer = trainer
        self._keep = keep
        self._writer = WriterThreads.start()
        self._running: tuple[BackgroundWrite, Path, dict[str, Any]] | None = None
        self._waited_seconds = 0.0
        use_thread_queue()
        use_parallel_reader()

    def save(self, directory: Path, iteration: int, driver_state: dict[str, Any]) -> Path:
        """Start saving to `directory/iteration_*` in the background; the folder appears once it is complete."""
        self._trainer.memory.require("weights", "saving a checkpoint")
        self.finish()
        self._trainer.optimizer.finish()
        final = checkpoint_path(directory, iteration)
        partial = partial_path(final)
        with _removed_on_failure(final):
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier()
            states = Written(optimizer_content(self._trainer.optimizer.megatron, _models(self._trainer)))
            content = _content(self._trainer, states.planned) | {"generators": _all_generators()}
            request = dist_checkpointing.save(content, str(partial), save_strategy(), async_sharded_save=True)
        live = [tensor for chunk in self._trainer.policy for tensor in (*chunk.parameters(), *chunk.buffers())]
        state = {"iteration": iteration, "driver": driver_state, "actor": _progress(self._trainer)}
        write = BackgroundWrite(request, live, states, self._writer)
        self._trainer.optimizer.wait_for_reader = lambda: self._wait_until_read(write)
        self._running = (write, final, state)
        return final

    def take_metrics(self) -> dict[str, float]:
        """Of this process since the last call."""
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return {"ranks/checkpoint_wait_seconds": waited}

    def _wait_until_read(self, write: BackgroundWrite) -> None:
        begin = time.perf_counter()
        write.wait_until_read()
        self._waited_seconds += time.perf_counter() - begin

    def poll(self) -> None:
        """Publish a running save if all processes have written their files."""
        self._publish(wait=False)

    def finish(self) -> None:
        """Wait for a running save and publish it."""
        self._publish(wait=True)

    def load(self, path: Path) -> dict[str, Any]:
        """Load into the trainer; returns the driver state.

        Raises:
            DamagedCheckpointError: a file is not what was written; nothing was loaded.
            CheckpointError: missing, of another format or another model; the run must not go on after it.
        """
        self._trainer.memory.require("weights", "loading a checkpoint")
        state = read_state(path)
        _check_identity(path, state["actor"]["model"], _identity(self._trainer))
        _check_content(path, state)
        self._trainer.optimizer.finish()
        states = optimizer_content(self._trainer.optimizer.megatron, _models(self._trainer))
        content = _content(self._trainer, states)
        try:
            loaded = dist_checkpointing.load(content, str(path), strict=StrictHandling.RAISE_ALL)
            _restore(self._trainer, loaded, state["actor"])
        except READ_ERRORS as error:
            raise CheckpointError(f"{path} cannot be read ({error_summary(error)}): use another checkpoint") from error
        return state["driver"]

    def _publish(self, wait: bool) -> None:
        if self._running is None:
            return
        write, final, state = self._running
        if not write.finished(wait):
            return
        self._running = None
        with _removed_on_failure(final):
            write.finalize()
            checksums = write.all_checksums()
            if dist.get_rank() == 0:
                publish(partial_path(final), final, state, self._keep, checksums)
            dist.barrier()


@contextmanager
def _removed_on_failure(final: Path) -> Iterator[None]:
    """Turns what goes wrong while a checkpoint is written into CheckpointError, and gives its space back."""
    try:
        yield
    except _WRITE_ERRORS as error:
        free = shutil.disk_usage(_existing(final)).free
        shutil.rmtree(partial_path(final), ignore_errors=True)
        raise CheckpointError(
            f"saving {final} failed with {free / 1e6:,.1f} MB free there ({error_summary(error)}); older ones are "
            "whole: free space or fix access"
        ) from error


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def _check_content(path: Path, state: dict[str, Any]) -> None:
    """Collective: each process reads its share of the files; all raise DamagedCheckpointError where one differs."""
    rank, count = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * count
    dist.all_gather_object(gathered, damaged_files(path, state, sorted(state["files"])[rank::count]))
    damaged = [name for names in gathered for name in names]
    if damaged:
        raise DamagedCheckpointError(
            f"{path}: {', '.join(damaged)} {'is' if len(damaged) == 1 else 'are'} damaged (the checksum differs): use "
            "another checkpoint"
        )


def sharding_metadata() -> dict[str, Any]:
    """How a model names and cuts its tensors in a checkpoint.

    Each layer's tensors have names of their own. Megatron would otherwise stack equal names of all layers into one
    tensor, which fails where layers differ in kind (Gated DeltaNet and attention) or in what is frozen.
    """
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,
    }


def _models(trainer: Trainer) -> dict[str, Any]:
    metadata = sharding_metadata()
    return {_chunk_key(trainer, index): trained_content(chunk, metadata) for index, chunk in enumerate(trainer.policy)}


def _content(trainer: Trainer, states: Sequence[ShardedTensor]) -> dict[str, Any]:
    """What Megatron saves or loads: sharded tensors of model, optimizer and reference. states: the optimizer's."""
    content = _models(trainer)
    if states:
        content["optimizer"] = {f"{shard.key} from {shard.global_offset}": shard for shard in states}
    if trainer.reference is not None:
        content["reference"] = _reference_content(trainer, trainer.reference, sharding_metadata())
    return content


def trained_content(chunk: PolicyModel, metadata: dict[str, Any]) -> dict[str, Any]:
    """The chunk's sharded tensors; those of its adapters alone where it has some, since all others are those of
    `model.path`."""
    content = chunk.sharded_state_dict(metadata=metadata)
    if chunk.lora is None:
        return content
    return {name: entry for name, entry in content.items() if ADAPTER.search(name)}


def load_trained(chunk: PolicyModel, loaded: dict[str, Any]) -> None:
    """Fill the chunk with what `dist_checkpointing.load` made of `trained_content`."""
    found = chunk.load_state_dict(loaded, strict=chunk.lora is None)
    if found.unexpected_keys:
        raise CheckpointError(f"the model has no place for {', '.join(found.unexpected_keys[:3])} of the checkpoint")


def _chunk_key(trainer: Trainer, index: int) -> str:
    return "model" if len(trainer.policy) == 1 else f"model{index}"


def _reference_content(trainer: Trainer, reference: ReferenceWeights, metadata: dict[str, Any]) -> dict[str, Any]:
    """The model's sharded tensors once more, under another name and with the reference's data."""
    weights = dict(zip((id(parameter) for parameter in reference.parameters), reference.weights, strict=True))
    content = {
        _chunk_key(trainer, index): trained_content(chunk, metadata) for index, chunk in enumerate(trainer.policy)
    }
    for entry in nested_values(content):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and id(entry.data) in weights:
            entry.data = weights[id(entry.data)]
    add_prefix_for_sharding(content, "reference.")
    return content


def _restore(trainer: Trainer, loaded: dict[str, Any], progress: dict[str, Any]) -> None:
    for index, chunk in enumerate(trainer.policy):
        load_trained(chunk, loaded.get(_chunk_key(trainer, index), {}))  # Megatron drops one without adapters
    restore_step(trainer.optimizer.megatron, progress["applied_steps"])
    trainer.optimizer.applied_steps = progress["applied_steps"]
    trainer.counts = UpdateCounts(**progress["counts"])
    _set_generators(loaded["generators"])


def _progress(trainer: Trainer) -> dict[str, Any]:
    return {
        "applied_steps": trainer.optimizer.applied_steps,
        "counts": asdict(trainer.counts),
        "model": _identity(trainer),
    }


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What must agree between a checkpoint and the configured run; plain JSON values."""
    actor = trainer.options.actor
    settings: dict[str, Any] = {
        "dtype": actor.dtype,
        "train_mtp": actor.train_mtp,
        "frozen_parameters": sorted(actor.frozen_parameters),
        "reference": trainer.reference is not None,
    }
    if actor.lora is not None:
        # A checkpoint of a full run has neither, and one of adapters not the weights that they belong to.
        settings |= {
            "lora": actor.lora.model_dump(include=_LORA_SETTINGS),
            "base": weights_fingerprint(trainer.options.model_path),
        }
    return json.loads(json.dumps(trainer.description.maths | settings))


def _check_identity(path: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    own = {"architecture": own["architecture"], "lora": None} | own  # what is told first
    key = next((key for key in own if saved.get(key) != own[key]), None)
    if key in _SETTINGS:
        raise CheckpointError(
            f"{path} was saved with {key} = {saved.get(key)}, and the configuration gives {own[key]}: "
            f"leave {_SETTINGS[key]} as in the run that saved it"
        )
    if key is not None:
        raise CheckpointError(
            f"{path} holds a model with {key} {saved.get(key)}, the configured one has {own[key]}: "
            "use the model.path of the run that saved it"
        )


def _all_generators() -> list[Any]:
    """The generator states of all processes, in rank order; the same list everywhere."""
    own = {
        "python": random.getstate(),
        "numpy": [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def _set_generators(saved: list[Any]) -> None:
    """Each process continues its own generators; with another number of processes the freshly seeded ones stay."""
    if len(saved) != dist.get_world_size():
        return
    own = saved[dist.get_rank()]
    random.setstate(_as_tuples(own["python"]))
    np.random.set_state(tuple(own["numpy"]))
    torch.set_rng_state(own["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(own["megatron"])


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def error_summary(error: BaseException) -> str:
    """The last line: torch's collected exceptions put the traceback of each rank before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:300]
