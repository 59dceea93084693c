"""Memory of one training process, measured where it happens."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_models import LENGTHS
from torch.autograd.graph import saved_tensors_hooks

from actor.checkpoint import Checkpointer
from actor.collectives.interception import Method, listen
from actor.collectives.operations import OPERATIONS, message_bytes
from actor.distributed import start_model_parallel
from actor.trainer import Trainer, TrainerOptions
from rlpipe.config.actor import ActorConfig
from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.jit_monitor import JitMonitor
from rlpipe.shared.pack import Pack


def measure(rank: int, count: int, path: Path, small: Path, actor: ActorConfig) -> dict[str, int]:
    """Bytes: what the model and optimizer added to the process, the peak of a training step, tensors kept for backward.

    A small model goes first, so that libraries have allocated what they allocate once.
    """
    start_model_parallel(actor, seed=3)
    _step(_trainer(small, actor))
    before = _own()
    trainer = _trainer(path, actor)
    _write_states(trainer)
    state = _own() - before
    kept = _kept(trainer)
    _own()
    files = _status("RssFile") + _status("RssShmem")
    _reset_peak()
    _step(trainer)
    return {"state": state, "peak": _status("VmHWM") - files - before, "kept": kept}


def measure_on_device(
    rank: int, count: int, path: Path, actor: ActorConfig, shares: tuple[int, ...] = LENGTHS
) -> dict[str, int]:
    """Bytes on the GPU: of parameters and gradients, the peak of a training step, and what CUDA holds beside torch's
    allocator.

    shares: of a pack's sequences in its tokens.

    A first step compiles and tunes, which takes room of its own.
    """
    JitMonitor.install()  # with it all cores compile what Triton tunes, as in a run
    start_model_parallel(actor, seed=3)
    trainer = _trainer(path, actor)
    state = torch.cuda.memory_allocated()
    _step(trainer, shares)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _step(trainer, shares)
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    return {"state": state, "peak": torch.cuda.max_memory_allocated(), "beside": beside}


def saved_bytes(rank: int, count: int, path: Path, cases: list[tuple[ActorConfig, bool]], folder: Path) -> list[int]:
    """Of the files of one checkpoint of each case: an actor, and whether it keeps a reference."""
    start_model_parallel(cases[0][0], seed=3)
    found = []
    for number, (actor, keep_reference) in enumerate(cases):
        trainer = _trainer(path, actor, keep_reference)
        _step(trainer)
        checkpointer = Checkpointer(trainer, keep=1)
        saved = checkpointer.save(folder / str(number), 1, {})
        checkpointer.finish()
        found.append(sum(file.stat().st_size for file in saved.rglob("*") if file.is_file()))
    return found


def _trainer(path: Path, actor: ActorConfig, keep_reference: bool = False) -> Trainer:
    return Trainer(TrainerOptions(path, None, keep_reference, actor, 10))


def _step(trainer: Trainer, shares: tuple[int, ...] = LENGTHS) -> None:
    pack = _pack(trainer.options.actor.max_tokens_per_gpu, shares)
    assert trainer.train_step([pack], AlgorithmConfig()).applied


def _write_states(trainer: Trainer) -> None:
    """Not every torch writes the zeros that moments begin with, and a page that nobody wrote is not there."""
    for adam in trainer.optimizer.adams:
        for state in adam.state.values():
            for value in state.values():
                value.add_(0)


def _kept(trainer: Trainer) -> int:
    """Bytes of the storages that a forward pass keeps for its backward pass, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for chunk in trainer.policy for parameter in chunk.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _step(trainer)
    return sum(kept.values())


def _pack(total: int, shares: tuple[int, ...]) -> Pack:
    lengths = [total * share // sum(shares) for share in shares]
    generator = np.random.default_rng(0)
    ones = np.ones(total, np.float32)
    return Pack(
        sample_ids=tuple(map(str, range(len(lengths)))),
        token_ids=generator.integers(0, 64, total),
        targets=generator.integers(0, 64, total),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        loss_mask=ones,
        loss_weights=ones / total,
        advantages=generator.normal(size=total).astype(np.float32),
        rollout_logprobs=-ones,
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        cu_seqlens_padded=(0, *np.cumsum(lengths).tolist()),
    )


def _own() -> int:
    """The process's memory without pages of files, as of the weights' file."""
    gc.collect()
    return _status("RssAnon")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def sent_in_a_forward_pass(rank: int, count: int, paths: list[Path], actor: ActorConfig) -> list[float]:
    """Bytes that this rank sends others in a forward pass over one pack, for each model."""
    start_model_parallel(actor, seed=3)
    sent = SentBytes()
    found = []
    for path in paths:
        trainer = _trainer(path, actor)
        leave = listen(sent)
        trainer.logprobs([_pack(actor.max_tokens_per_gpu * actor.parallel.context, LENGTHS)], "policy")
        leave()
        found.append(sent.take())
    return found


class SentBytes:
    """Bytes of all operations, as a ring sends them."""

    def __init__(self) -> None:
        self._bytes = 0.0

    def around(self, operation: str, call: Method) -> Method:
        if operation not in OPERATIONS:
            return call

        def counted(group: Any, *arguments: Any, **keywords: Any) -> Any:
            size = message_bytes([*arguments, *keywords.values()])
            self._bytes += (2 if operation == "all_reduce" else 1) * size * (group.size() - 1) / group.size()
            return call(group, *arguments, **keywords)

        return counted

    def take(self) -> float:
        taken, self._bytes = self._bytes, 0.0
        return taken
