"""Joins the processes of the actor: torch.distributed, Megatron's parallel groups, seeds, threads."""

import random
import socket
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from actor.device import collective_backend
from rlpipe.config.actor import ActorConfig


def open_store(address: str, processes: int, timeout_seconds: float) -> dist.TCPStore:
    """Rank 0's rendezvous, on a port that the system chooses, so that no other process can take it in between.

    It listens at `address` only; torch by itself would listen at every address of the machine.
    """
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        processes,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(address: str, port: int, processes: int, timeout_seconds: float) -> dist.TCPStore:
    """The other ranks' side of `open_store`."""
    return dist.TCPStore(
        address, port, processes, is_master=False, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False
    )


def join_processes(store: dist.Store, rank: int, processes: int, timeout_seconds: float) -> None:
    """Initialise torch.distributed; a collective that waits longer than `timeout_seconds` fails."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # Ray shows each process exactly its own GPU
    dist.init_process_group(
        collective_backend(),
        store=store,
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=timeout_seconds),
    )


def start_model_parallel(actor: ActorConfig, seed: int) -> None:
    """Make Megatron's groups for the layout of `actor` and seed every generator of this process."""
    parallel = actor.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def leave() -> None:
    """Undo `start_model_parallel` and `join_processes`."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
