"""The smallest change of a configuration that makes a run fit: few settings first, cheap ones before dear ones."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from rlpipe.config.actor import LARGEST_BFLOAT16_BETA2
from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.root import Config

_MOST_CHANGES = 3
Setting = tuple[str, ...]


def nearest_setting(
    config: Config, cluster: ClusterConfig, fits: Callable[[Sequence[str]], bool]
) -> tuple[str, ...] | None:
    """Overrides under which `fits` holds, or None. Tries one change, then pairs, then triples, in order of cost."""
    changes = list(_changes(config, cluster))
    for count in range(1, _MOST_CHANGES + 1):
        for chosen in combinations(changes, count):
            keys = [setting.split("=")[0] for change in chosen for setting in change]
            settings = tuple(setting for change in chosen for setting in change)
            if len(set(keys)) == len(keys) and fits(settings):
                return settings
    return None


def _changes(config: Config, cluster: ClusterConfig) -> Iterator[Setting]:
    """Independent changes, the cheapest in speed first."""
    actor, engine = config.actor, config.rollout.engine
    if actor.optimizer.cpu_offload_fraction < 1:
        yield ("actor.optimizer.cpu_offload_fraction=1.0",)
    if config.weight_sync.bucket_bytes > 2**28:
        yield (f"weight_sync.bucket_bytes={2**28}",)
    for fraction in () if config.sft else _fractions(engine.memory_share):
        yield (f"rollout.engine.memory_fraction={fraction}",)
    if actor.recompute.chosen != "full":
        yield ("actor.recompute.granularity=full",)
    longest = config.data.max_prompt_tokens + config.longest_training_response_tokens
    multiple = actor.parallel.pack_multiple
    least = -(-longest // multiple) * multiple // actor.parallel.context
    if least < actor.pack_tokens:
        yield (f"actor.max_tokens_per_gpu={least}",)
    if actor.optimizer.moments_dtype == "float32" and actor.optimizer.beta2 <= LARGEST_BFLOAT16_BETA2:
        yield ("actor.optimizer.moments_dtype=bfloat16",)
    if config.sft is None:
        yield from _wider_engines(config, cluster)
        yield from _layouts(config, cluster)
    if engine.max_running_requests > 8 and not cluster.gpus:
        yield (f"rollout.engine.max_running_requests={engine.max_running_requests // 4}",)


def _fractions(present: float) -> Iterator[float]:
    """Nearest first."""
    steps = [step / 100 for step in range(20, 95, 5)]
    yield from sorted((step for step in steps if step != present), key=lambda step: (abs(step - present), step))


def _wider_engines(config: Config, cluster: ClusterConfig) -> Iterator[Setting]:
    """Colocated engines that span more of the actor's GPUs, and are fewer."""
    processes = config.actor.processes
    for width in (2, 4, 8):
        fits_node = cluster.gpus and width <= cluster.node.gpus and processes % width == 0
        if config.ray.colocate and fits_node and width > config.rollout.engine.tensor_parallel:
            yield (f"rollout.engines={processes // width}", f"rollout.engine.tensor_parallel={width}")


def _layouts(config: Config, cluster: ClusterConfig) -> Iterator[Setting]:
    """Half of the GPUs for the actor, half for engines that are as wide as they need to be."""
    if cluster.gpus < 2:
        return
    parallel = config.actor.parallel
    half = cluster.gpus // 2
    experts = min(parallel.expert, half)
    for tensor, context in ((parallel.tensor, parallel.context), (1, min(half, parallel.context * parallel.tensor))):
        if half % (tensor * context * parallel.pipeline):
            context = max(1, half // (tensor * parallel.pipeline))
        for width in (1, 2, 4, 8):
            if width > half:
                continue
            yield (
                "ray.colocate=false",
                f"actor.processes={half}",
                f"actor.parallel.tensor={tensor}",
                f"actor.parallel.sequence={'true' if tensor > 1 else 'false'}",
                f"actor.parallel.context={context}",
                f"actor.parallel.expert={experts}",
                f"rollout.engines={half // width}",
                f"rollout.engine.tensor_parallel={width}",
            )
