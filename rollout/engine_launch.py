"""From the configuration to engines: what each is started with, and its Ray actor."""

import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rlpipe.config.root import Config
from rlpipe.flops.route_shape import route_shape
from rlpipe.jit_monitor import worker_caches
from rlpipe.model.hub import HubName
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.remote import cluster_accelerator
from rlpipe.shared.weights import EngineAdapter
from rollout.arguments import EngineSetup
from rollout.cleanup import engine_directory
from rollout.device_checks import check_device
from rollout.engine_environment import DeviceKind, engine_environment
from rollout.fleet import RunningEngine
from rollout.requests import SamplingParameters


def engine_setups(
    config: Config,
    model_path: str,
    placement: Any = None,
    log_directory: str | None = None,
    adapter: EngineAdapter | None = None,
    with_text: bool = False,
) -> list[EngineSetup]:
    """Of all engines of `config`; see `RolloutPool.start`. Raises ConfigError for what no engine on a CPU can do."""
    run = uuid.uuid4().hex[:8]
    device: DeviceKind = "cuda" if _gpus(placement) else "cpu"
    check_device(device, config.rollout.engine)
    setups = [
        _setup(config, index, model_path, device, f"{run}e{index}", log_directory)
        for index in range(config.rollout.engines)
    ]
    setups = [replace(setup, adapter=adapter, with_text=with_text) for setup in setups]
    if placement is None:
        return setups
    return [replace(setup, devices=placement.devices_of(setup.index)) for setup in setups]


def launch_engine(setup: EngineSetup, placement: Any = None) -> RunningEngine:
    """Starts one engine in the background."""
    from rollout.engine import Engine

    environment = engine_environment(
        setup.device, setup.engine.tensor_parallel, engine_directory(setup.instance), os.environ
    )
    options: dict[str, Any] = {
        "name": f"rollout-engine-{setup.instance}",
        "num_cpus": 1 if placement is not None else 0,
        "num_gpus": _gpus(placement),
        "max_restarts": 0,
        "runtime_env": {"env_vars": environment | worker_caches(setup.jit.cache_directory, cluster_accelerator())},
    }
    if placement is not None:
        options["scheduling_strategy"] = placement.strategy(setup.index)
    return RunningEngine(setup, ray.remote(Engine).options(**options).remote(setup))


def _gpus(placement: Any) -> float:
    return placement.gpus_per_bundle if placement is not None else 0


def _setup(
    config: Config, index: int, model_path: str, device: DeviceKind, instance: str, log_directory: str | None
) -> EngineSetup:
    rollout = config.rollout
    directory = Path(log_directory) if log_directory else engine_directory(instance)
    return EngineSetup(
        index=index,
        model_path=_from_anywhere(model_path),
        device=device,
        engine=rollout.engine,
        request_tokens=config.data.max_prompt_tokens + config.longest_response_tokens,
        needs_tokenizer=config.uses_stop_strings,
        verify_weights=config.weight_sync.verify,
        sends_draft=config.sends_draft_weights,
        memory_saver=device == "cuda" and config.ray.shares_memory(gpus=True),
        seed=config.seed,
        instance=instance,
        routes_shape=_routes_shape(config, model_path),
        log_path=str((directory / f"rollout_engine_{index}.log").resolve()),
        jit=config.jit,
        warm_up=_sampling_kinds(config) if config.jit.warms_up(device == "cuda") else (),
        later_turns=not config.rollout.generate.is_single_turn,
        reuses_prefixes=config.reuses_prefixes,
    )


def _from_anywhere(model_path: str) -> str:
    """A folder's absolute path; the name of a hub model, which each engine finds in its own node's cache, as it is."""
    path = Path(model_path)
    return str(path.resolve()) if path.exists() or HubName.parse(model_path) is None else model_path


def _sampling_kinds(config: Config) -> tuple[SamplingParameters, ...]:
    """The different ways in which tokens are chosen in this run."""
    training = [SamplingParameters.training(config.rollout, one.sampling) for one in config.data.train]
    evaluation = [SamplingParameters.evaluation(config.rollout, config.eval, one) for one in config.eval.datasets]
    kinds = [replace(one, max_new_tokens=0, stop=(), stop_token_ids=()) for one in (*training, *evaluation)]
    return tuple(dict.fromkeys(kinds))


def _routes_shape(config: Config, model_path: str) -> tuple[int, int] | None:
    """Layers and experts per token, where the actor repeats the engines' expert choices."""
    if not config.algorithm.routing_replay:
        return None
    shape = route_shape(describe_model(model_path).shape)
    return shape.layers, shape.experts_per_token
