"""Writes the files of a Megatron checkpoint in a thread while training goes on.

Megatron's own asynchronous path forks writer processes and keeps a manager process for their results; forking a
process with many threads and a large host-resident optimizer state is neither safe nor cheap. Here a thread writes the
very same buckets. Weights are staged in host memory first; the optimizer's states, several times as large, are written
from where they lie in it, and the next update waits until they are.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from actor.device import compute_device, pageable_copy
from rlpipe.shared.checkpoint_folder import file_checksum
from rlpipe.shared.replaced_parts import relies_on, replaces

replaces(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:_results_queue",
    why="results of a thread's writes need no manager process, which Megatron would fork",
    drop_when="Megatron's asynchronous save can write in a thread",
)
relies_on(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.prepare_write_data",
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.get_save_function_and_args",
    why="its buckets hold what has no memory of its own as it is, and the memory is found by name and offset",
    drop_when="Megatron can write views of host memory without copying all of them first",
)
relies_on(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
    why="a thread writes the very same buckets as Megatron's own processes would",
    drop_when="Megatron's asynchronous save can write in a thread",
)


_FILES = 4  # of each rank, each written by a thread: one alone does not reach what a disk can take


def use_thread_queue() -> None:
    """Give Megatron a plain queue for write results, before it starts a manager process for one."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def save_strategy() -> TorchDistSaveShardedStrategy:
    """Megatron's format, with a file for each of those threads."""
    return TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=_FILES)


@dataclass(frozen=True)
class WriterThreads:
    """Of a process, for all of its saves: one that waits for those that write a file each, always the same one.

    The C library gives each thread memory of its own and keeps it. Of threads that take whichever file comes next, one
    may write its first or its largest only in a later save, and the process would grow until then.
    """

    waiting: Executor
    files: tuple[Executor, ...]

    @classmethod
    def start(cls) -> "WriterThreads":
        waiting, *files = (
            ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint-writer-{number}") for number in range(1 + _FILES)
        )
        return cls(waiting, tuple(files))

    def for_each(self, call: Callable[..., Any], *values: Iterable[Any]) -> list[Any]:
        """What `call` gives for each file, in their order; raises what one of them does, when all are done."""
        turns = zip(cycle(self.files), zip(*values, strict=True), strict=False)
        futures = [thread.submit(call, *one) for thread, one in turns]
        wait(futures)
        return [future.result() for future in futures]


class Written:
    """Tensors that are written from where they lie: their shards without memory, for Megatron to plan with."""

    def __init__(self, shards: Sequence[ShardedTensor]) -> None:
        self.planned = [replace(shard, data=torch.empty_like(shard.data, device="meta")) for shard in shards]
        self._tensors = {(shard.key, tuple(shard.global_offset)): shard.data for shard in shards}

    def get(self, item: Any) -> torch.Tensor | None:
        """Of one of Megatron's items; None for what is none of these."""
        return self._tensors.get((item.index.fqn, tuple(item.index.offset or ())))


class BackgroundWrite:
    """One running save. `finished` and `finalize` are collective: every process calls them at the same point."""

    def __init__(
        self, request: AsyncRequest, live_tensors: Sequence[torch.Tensor], in_place: Written, threads: WriterThreads
    ) -> None:
        """live_tensors: those that training changes while the files are written; they are copied first. in_place: what
        it may change only after `wait_until_read`, as far as it is none of those."""
        self._request = request
        self._checksums: dict[str, str] = {}
        self._read = threading.Event()
        self._writing: Future[None] | None = None
        if request.async_fn is None:  # this process has nothing to write
            return
        _, planned, results = request.async_fn_args
        transforms = request.async_fn.args[0]
        buckets = _staged(planned, live_tensors, in_place)
        self._writing = threads.waiting.submit(
            _write, transforms, buckets, results, self._checksums, self._read, threads
        )

    def wait_until_read(self) -> None:
        """Returns once nothing of this process is read any more."""
        if self._writing is not None:
            self._read.wait()

    def finished(self, wait: bool) -> bool:
        """Whether every process has written its files; with `wait` it first waits for its own."""
        done = self._writing is None or wait or self._writing.done()
        if self._writing is not None and done:
            self._writing.result()
        running = torch.tensor([float(not done)], device=compute_device())
        torch.distributed.all_reduce(running, op=torch.distributed.ReduceOp.MAX)
        return not bool(running.item())

    def all_checksums(self) -> dict[str, str]:
        """Collective: checksums of the files of all processes, by name."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, self._checksums)
        return {name: checksum for one in gathered for name, checksum in one.items()}

    def finalize(self) -> None:
        """Collect the results of all processes and write the metadata; raises where a process failed to write."""
        for function in self._request.finalize_fns:
            function()


@dataclass(frozen=True)
class _Tensors:
    """Pairs of item and tensor, of which those in place get a storage of their own when their turn comes."""

    pairs: Sequence[tuple[Any, torch.Tensor]]
    in_place: frozenset[int]

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for number, (item, tensor) in enumerate(self.pairs):
            yield item, _alone(tensor) if number in self.in_place else tensor


def _staged(buckets: list[Any], live_tensors: Sequence[torch.Tensor], in_place: Written) -> list[Any]:
    live = {tensor.untyped_storage().data_ptr() for tensor in live_tensors}

    def stays(tensor: torch.Tensor) -> bool:
        """A master that is updated where it lies is the very weight that a reference pass replaces."""
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() not in live

    def stable(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu:
            return pageable_copy(tensor)
        return tensor if stays(tensor) else tensor.clone()

    def tensors(planned: Sequence[tuple[Any, torch.Tensor]]) -> _Tensors:
        found = [in_place.get(item) for item, _ in planned]
        left = frozenset(number for number, tensor in enumerate(found) if tensor is not None and stays(tensor))
        return _Tensors(
            [
                (item, own if own is not None and number in left else stable(tensor if own is None else own))
                for number, ((item, tensor), own) in enumerate(zip(planned, found, strict=True))
            ],
            left,
        )

    return [(path, name, (blobs, tensors(planned))) for path, name, (blobs, planned) in buckets]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own, since a file gets whole storages; a copy of what has gaps."""
    if not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    memory = tensor.view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)


def _write(
    transforms: list[Any],
    buckets: list[Any],
    results: Any,
    checksums: dict[str, str],
    read: threading.Event,
    threads: WriterThreads,
) -> None:
    """Megatron's writer reports errors as values; they are raised again on all processes in `finalize`."""
    try:
        outcomes = threads.for_each(partial(_written_file, transforms), range(len(buckets)), buckets)
        written = dict(enumerate(outcomes))
    finally:
        read.set()  # the checksums are of files
    failed = [outcome for outcome in written.values() if isinstance(outcome, Exception)]
    try:
        if not failed:
            digests = threads.for_each(file_checksum, [Path(path) for path, _, _ in buckets])
            checksums.update(zip([name for _, name, _ in buckets], digests, strict=True))
    except OSError as error:
        failed = [error]
    results.put(failed[0] if failed else written)


def _written_file(transforms: list[Any], index: int, bucket: Any) -> Any:
    """What Megatron notes of it, or what its writer met."""
    own, ticket = queue.Queue(), queue.Queue()  # type: ignore[var-annotated]
    ticket.put(index)
    FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, own, ticket, use_fsync=True)
    _, outcome = own.get_nowait()
    return outcome
