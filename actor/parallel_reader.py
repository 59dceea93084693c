"""Reads the tensors of a Megatron checkpoint in several threads: torch reads one after the other, which of tens of
gigabytes takes minutes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from rlpipe.shared.replaced_parts import relies_on, replaces

_READER = replaces(
    "megatron.core.dist_checkpointing.strategies.torch:CachedMetadataFileSystemReader",
    why="tensors of a checkpoint are read in several threads",
    drop_when="torch's FileSystemReader reads in threads, or Megatron lets its reader be chosen",
)
relies_on(
    "megatron.core.dist_checkpointing.strategies.torch:_get_filesystem_reader",
    why="it takes the reader by its name in this module, so that ours is the one that reads",
    drop_when="torch's FileSystemReader reads in threads, or Megatron lets its reader be chosen",
)
_THREADS = 4  # each holds the tensor that it reads


class _ParallelReader(_READER.original()):  # type: ignore[misc]
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """As torch's, each item as a plan of its own."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-reader") as threads:
            for read in [
                threads.submit(FileSystemReader.read_data, self, replace(plan, items=[item]), planner)
                for item in plan.items
            ]:
                read.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def use_parallel_reader() -> None:
    """Let Megatron load checkpoints with it."""
    torch_strategies.CachedMetadataFileSystemReader = _ParallelReader
