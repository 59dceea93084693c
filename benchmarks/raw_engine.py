"""SGLang's own Engine in a Ray actor, with nothing of rollout/ but the CPU's stand-ins."""

import asyncio
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import ray

from rlpipe.config.root import Config
from rlpipe.estimate.gpu_generations import has_flash_attention_3
from rlpipe.training.placement import Placement
from rollout.cleanup import remove_files, remove_opened_files
from rollout.engine_environment import DeviceKind, engine_environment
from rollout.engine_launch import engine_setups
from rollout.engine_start import checked_setup, prepare_process, sglang_arguments

_STACKS = "RAW_ENGINE_STACKS"


def runnable_attention() -> dict[str, str]:
    """Arguments for a GPU: SGLang takes FlashAttention-3 also where its kernel package lacks it."""
    return {} if has_flash_attention_3() else {"attention_backend": "triton"}


class RawEngine:
    """arguments: of the engine. config: has the engine take the pool's arguments instead, and nothing else of it. Its
    scheduler writes its stacks into the file `stacks` of the policy's folder when it gets SIGUSR1."""

    def __init__(self, folder: str, arguments: dict[str, Any], config: Config | None, place: Placement) -> None:
        self._instance = ""
        if config is not None:
            setup = checked_setup(engine_setups(config, folder, place, f"{folder}/raw")[0])
            prepare_process(setup)
            arguments, self._instance = sglang_arguments(setup)[0], setup.instance
        os.environ[_STACKS] = f"{folder}/stacks"
        from sglang.srt.entrypoints.engine import Engine

        class Watched(Engine):
            run_scheduler_process_func = staticmethod(_run_scheduler)

        self._engine = Watched(**arguments)

    def pid(self) -> int:
        return os.getpid()

    def generate(
        self,
        prompts: list[list[int]],
        sampling: dict[str, Any] | list[dict[str, Any]],
        logprobs: bool = True,
        one_by_one: bool = False,
    ) -> int:
        """Number of response tokens."""
        if one_by_one:
            each = zip(prompts, sampling if isinstance(sampling, list) else [sampling] * len(prompts), strict=True)
            calls = [
                self._engine.async_generate(input_ids=prompt, sampling_params=one, return_logprob=logprobs)
                for prompt, one in each
            ]
            answers = self._engine.loop.run_until_complete(_all(calls))
        else:
            answers = self._engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=logprobs)
        return sum(len(answer["output_ids"]) for answer in answers)

    def start_profile(self, folder: str, steps: int) -> None:
        """Leave a trace of the GPU in the next `steps` steps in `folder`."""
        self._engine.start_profile(output_dir=folder, num_steps=steps, activities=["GPU"])

    def stop(self) -> None:
        remove_opened_files(self._engine.port_args.instance_id)
        self._engine.shutdown()
        if self._instance:
            remove_files(self._instance)


def _run_scheduler(*arguments: Any, **keywords: Any) -> None:
    from sglang.srt.managers.scheduler import run_scheduler_process

    with open(os.environ[_STACKS], "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        run_scheduler_process(*arguments, **keywords)


async def _all(calls: list[Any]) -> list[Any]:
    return await asyncio.gather(*calls)


def start_raw(place: Placement, folder: str, arguments: dict[str, Any], config: Config | None = None) -> Any:
    """A `RawEngine` actor; see there."""
    device: DeviceKind = "cuda" if place.gpus_per_bundle else "cpu"
    actor = ray.remote(RawEngine).options(
        num_cpus=0,
        num_gpus=place.gpus_per_bundle,
        scheduling_strategy=place.strategy(0),
        runtime_env={"env_vars": engine_environment(device, 1, Path(folder), os.environ)},
    )
    return actor.remote(folder, arguments, config, place)
