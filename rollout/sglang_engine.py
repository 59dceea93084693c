"""SGLang's Engine with our scheduler entry point, a known name for its temporary files, and no idle process."""

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
from sglang.srt.server_args import (
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    PortArgs,
    ServerArgs,
    add_deterministic_attention_backend_choices,
    add_radix_supported_deterministic_attention_backend_choices,
)

from rlpipe.shared.replaced_parts import replaces
from rollout.scheduler_ahead import SchedulersAhead
from rollout.sglang_patches import state_caches
from rollout.sglang_patches.scheduler_entry import SchedulerEntry, main_left_out

replaces(
    "sglang.srt.entrypoints.engine:Engine._launch_scheduler_processes",
    "sglang.srt.entrypoints.engine:Engine._launch_detokenizer_subprocesses",
    why="shared memory under a known name, and no detokenizer where token ids are the answer",
    drop_when="an argument of SGLang's server names its files, and skip_tokenizer_init starts no detokenizer",
)


def start_sglang(instance: str, arguments: dict[str, Any], ahead: SchedulersAhead) -> Engine:
    """Starts an engine, whose schedulers are those `ahead`, and blocks until it can answer. Raises what SGLang raises.

    Call it in the thread whose event loop will run the engine's coroutines, and not in the main thread: there SGLang
    would install a signal handler that kills the whole process tree.
    """
    if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        # With our attention in it, each token is computed by itself, independently of the batch and of the cache.
        add_deterministic_attention_backend_choices(["torch_native"])
        add_radix_supported_deterministic_attention_backend_choices(["torch_native"])

    state_caches.install()

    class NamedEngine(Engine):
        """An engine of which `instance` is the name in /dev/shm."""

        run_scheduler_process_func = staticmethod(SchedulerEntry())

        @classmethod
        def _launch_scheduler_processes(
            cls, server_args: ServerArgs, port_args: PortArgs, run_scheduler_process_func: Callable[..., None]
        ) -> tuple[SchedulerInitResult, list[Any] | None]:
            port_args.instance_id = instance
            with main_left_out(), ahead.become_spawned():
                return super()._launch_scheduler_processes(server_args, port_args, run_scheduler_process_func)

        @classmethod
        def _launch_detokenizer_subprocesses(
            cls, server_args: ServerArgs, port_args: PortArgs, run_detokenizer_process_func: Callable[..., None]
        ) -> tuple[list[Any], list[str]]:
            if server_args.skip_tokenizer_init:
                return [], []  # token ids go straight from the scheduler to this process
            return super()._launch_detokenizer_subprocesses(server_args, port_args, run_detokenizer_process_func)

    os.environ.setdefault("SGLANG_RUN_ID", instance)
    return NamedEngine(**arguments)


def server_argument_names() -> frozenset[str]:
    """Fields of SGLang's ServerArgs."""
    return frozenset(ServerArgs.__dataclass_fields__)
