"""What is chosen by memory at the start of a run, before workers start, and kept when it is resumed."""

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.load import load_config
from rlpipe.config.root import Config
from rlpipe.estimate.automatic import choice_note, is_automatic, with_choice_of
from rlpipe.estimate.present_cluster import host_memory_bytes, present_cluster
from rlpipe.estimate.run_estimate import plan
from rlpipe.monitoring.run_directory import RunDirectory
from rlpipe.shared.errors import ConfigError
from rlpipe.training.ray_cluster import ray_cluster
from rlpipe.training.trained_share import planned_model

_LEAST_PROCESS_BYTES = 100 * 10**6
"""Of any process that has imported what it works with, without any weights."""


def with_memory_choices(config: Config, resume: bool = False) -> tuple[Config, tuple[str, ...]]:
    """The configuration without `auto` in the actor's settings, and what to tell the user. The model must be there.

    The same on every start on the same hardware; a resumed run keeps what it began with, wherever it goes on. Raises
    ConfigError for more workers than there can be.
    """
    check_process_count(config)
    if not is_automatic(config):
        return config, ()
    saved = RunDirectory.of(config).config
    if resume and saved.exists():
        chosen = with_choice_of(config, load_config(saved))
        return chosen, (f"{choice_note(config, chosen)}, as the run began",)
    planned = plan(config, planned_model(config), _cluster(config))
    problems = tuple(f"by rlpipe plan this does not fit: {problem}" for problem in planned.problems)
    return planned.config, planned.notes + tuple(f"warning: {one}" for one in problems + planned.warnings)


def check_process_count(config: Config) -> None:
    """Raise ConfigError for more workers than this machine can hold, where a run has no other one."""
    engines = config.rollout.engines * config.rollout.engine.tensor_parallel
    most = host_memory_bytes() // _LEAST_PROCESS_BYTES
    if config.reward.workers > most:
        raise ConfigError(
            f"reward.workers is {config.reward.workers}, but this machine's {_hold_at_most(most)}: lower it"
        )
    if config.ray.address is None and engines + config.actor.processes > most:
        raise ConfigError(
            f"rollout.engines x rollout.engine.tensor_parallel + actor.processes is {engines} + "
            f"{config.actor.processes}, but without ray.address all of them start on this machine, whose "
            f"{_hold_at_most(most)}: lower them, or set ray.address to the cluster that is meant (auto on one of its "
            "nodes)"
        )


def _hold_at_most(processes: int) -> str:
    return f"{host_memory_bytes() / 1e9:.0f} GB hold at most {processes} such processes"


def _cluster(config: Config) -> ClusterConfig:
    """Where the run's workers will be: this machine, or a node with GPUs of the cluster that the run joins."""
    return present_cluster() if config.ray.address is None else _joined_cluster(config)


def _joined_cluster(config: Config) -> ClusterConfig:
    import ray

    with ray_cluster(config):
        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = [int(one["GPU"]) for one in resources if one.get("GPU")]
        ask = ray.remote(num_cpus=0, num_gpus=1 if gpus else 0, max_retries=0)(present_cluster)
        node: ClusterConfig = ray.get(ask.remote(), timeout=config.deadlines.start_seconds)
    if not gpus:
        return node.model_copy(update={"nodes": len(resources)})
    of_one = node.node.model_copy(update={"gpus": max(gpus)})
    return node.model_copy(update={"nodes": len(gpus), "node": of_one})
