"""Starting SGLang in the process of an engine: what the process needs before, and the arguments."""

import faulthandler
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.model.hub import model_folder
from rlpipe.shared.replaced_parts import relies_on
from rollout import cleanup, fp8_arguments, kv_memory
from rollout.arguments import EngineSetup, kv_cache_tokens, server_arguments
from rollout.device_checks import check_device
from rollout.draft_arguments import chosen_steps
from rollout.failures import STARTS_AGAIN, check_model_folder
from rollout.model_modules import unneeded_model_modules
from rollout.moe_kernels import use_measured_blocks
from rollout.scheduler_ahead import SchedulersAhead
from rollout.sglang_patches.sglang_version import check_sglang_version
from rollout.weights.receiver import VERIFY_VARIABLE

relies_on(
    "sglang.srt.distributed.bootstrap:_resolve_dist_init_method",
    texts=("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE",),
    why="a file takes the place of a port where tensor-parallel ranks meet",
    drop_when="an argument of SGLang's server names the place",
)

_MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def checked_setup(setup: EngineSetup) -> EngineSetup:
    """With the model as a folder of this machine. Raises an RlpipeError for what cannot start here."""
    setup = replace(setup, model_path=str(model_folder(setup.model_path)))
    check_sglang_version()
    check_model_folder(setup)
    check_device(setup.device, setup.engine)
    if setup.device == "cpu":
        kv_memory.check(setup, kv_cache_tokens(setup))
    return setup


def prepare_process(setup: EngineSetup) -> None:
    """Call before SGLang is imported, which reads the environment then."""
    _use_own_temporary_folder(setup.instance)
    if setup.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(setup.devices)
    _redirect_output(setup.log_path, keep=setup.restart > 0)
    os.environ[fp8_arguments.VARIABLE] = setup.engine.quantization
    os.environ[VERIFY_VARIABLE] = "1" if setup.verify_weights else "0"
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
        unneeded_model_modules(setup.model_path, setup.engine.draft.predicts)
    )
    _ignore_quit_signal()
    cleanup.avoid_named_semaphores()
    if setup.device == "cuda":
        use_measured_blocks(cleanup.engine_directory(setup.instance) / "moe_kernels")


def schedulers_ahead(setup: EngineSetup) -> SchedulersAhead:
    """Call after `prepare_process`: what they import reads the environment, too."""
    if not setup.memory_saver:
        return SchedulersAhead(setup.engine.tensor_parallel)
    # Its library has to be there when a process begins, as SGLang will see to.
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        return SchedulersAhead(setup.engine.tensor_parallel)


def sglang_arguments(setup: EngineSetup) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Of SGLang's Engine, and what of it one may not expect. Imports SGLang."""
    from rollout.sglang_engine import server_argument_names

    pools = None if setup.device == "cpu" else kv_memory.gpu_pools(setup)
    kernels, notes = _supported_kernels(setup)
    known, recurrent = server_argument_names(), kv_memory.has_recurrent_states(setup)
    steps = chosen_steps(setup.engine.draft, cleanup.engine_directory(setup.instance))
    cache = {"disable_radix_cache": True} if kv_memory.does_without_prefixes(setup) else {}
    return cache | server_arguments(setup, known, pools, recurrent) | kernels | steps, notes


def _supported_kernels(setup: EngineSetup) -> tuple[dict[str, str], tuple[str, ...]]:
    """Arguments in place of SGLang's own choices that cannot run here; the user's choice stays."""
    if setup.device == "cpu" or "attention_backend" in setup.engine.sglang:
        return {}, ()
    from rollout.sglang_patches.attention_kernel import supported_attention

    backend, note = supported_attention()
    return {"attention_backend": backend} if backend else {}, (note,) if note else ()


def _redirect_output(path: str, keep: bool) -> None:
    """Lets this process and its children print into `path`; keep: behind what a lost engine printed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if keep else os.O_TRUNC), 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if keep:
        os.write(log, f"{STARTS_AGAIN}\n".encode())
    os.close(log)


def _ignore_quit_signal() -> None:
    """A failing child sends SIGQUIT to its parent, which by default would end this process without a word.

    Python sets signal handlers in the main thread only; faulthandler sets one from any thread. Its dump is not wanted.
    """
    faulthandler.register(signal.SIGQUIT, file=os.open(os.devnull, os.O_WRONLY), all_threads=False)


def _use_own_temporary_folder(instance: str) -> None:
    """Sockets and scratch files of SGLang go into a folder that can be removed as a whole."""
    cleanup.remove_abandoned()
    folder = cleanup.claim_directory(instance)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = str(folder)
    # SGLang's ranks meet in a file: of a port that it chooses, any address of the machine would listen, seconds later.
    os.environ[_MEETING_VARIABLE] = (folder / "store").as_uri()
