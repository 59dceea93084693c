"""Entry point of SGLang's scheduler processes: patches first, then SGLang's own entry point."""

import gc
import os
from typing import Any

from rlpipe.shared.replaced_parts import replaces
from rollout.cleanup import avoid_named_semaphores
from rollout.fp8_arguments import quantization_here
from rollout.jit_watch import install_in_scheduler
from rollout.scheduler_ahead import leave_megatron_out
from rollout.sglang_patches import (
    draft_choice,
    draft_clock,
    draft_verification,
    first_token,
    fp8_model,
    gathered_prefill,
    memory_pause,
    plain_draw,
    prompts_once,
    sampling_kinds,
    seeded_draw,
    state_caches,
    text_positions,
)
from rollout.sglang_patches.sglang_version import check_sglang_version
from rollout.weights import drafting_model
from rollout.weights import receiver as weight_receiver

replaces(
    "sglang.srt.managers.scheduler:run_scheduler_process",
    why="patches come first in a scheduler's process",
    drop_when="nothing is patched there any more",
)


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """Takes the arguments of `sglang.srt.managers.scheduler.run_scheduler_process`; returns when the engine stops."""
    leave_megatron_out()
    install_in_scheduler()
    check_sglang_version()
    avoid_named_semaphores()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from rollout.sglang_patches import cpu_patches

        cpu_patches.install()
        prompts_once.install()
    state_caches.install()
    sampling_kinds.install()
    gathered_prefill.install()
    weight_receiver.install()
    memory_pause.install()
    text_positions.install()
    first_token.install_in_scheduler()
    from sglang.srt.managers.scheduler import run_scheduler_process

    if quantization_here() != "none":
        fp8_model.install(quantization_here())
    server_arguments = arguments[0] if arguments else keywords["server_args"]
    if server_arguments.device == "cuda":
        (seeded_draw if server_arguments.enable_deterministic_inference else plain_draw).install()
    _install_drafting(server_arguments)
    gc.freeze()  # as in rlpipe/shared/collection.py; SGLang has the collector look twice as it captures graphs
    gc.enable()  # paused by SchedulerEntry
    run_scheduler_process(*arguments, **keywords)


def _install_drafting(server_arguments: Any) -> None:
    """What an engine with drafts does differently; SGLang's ServerArgs say whether it has them."""
    if server_arguments.speculative_algorithm is None:
        return
    if server_arguments.speculative_algorithm == "NGRAM":
        draft_verification.install("ngram_worker")
        return
    draft_verification.install("eagle_worker_common")
    drafting_model.install()
    draft_clock.install()
    if server_arguments.speculative_adaptive:
        draft_choice.install()
