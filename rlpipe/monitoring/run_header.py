"""The first lines of a run: where it is, what it trains, and on what."""

from rlpipe.config.layout import ActorLayout
from rlpipe.config.root import Config
from rlpipe.estimate.gpu_generations import support_line
from rlpipe.estimate.present_cluster import visible_capability
from rlpipe.monitoring.run_directory import RunDirectory


def run_header(config: Config, directory: RunDirectory) -> list[tuple[str, str]]:
    """(name, value) for the console."""
    facts = [
        ("run", str(directory.path)),
        ("logs", f"{directory.logs}  (rlpipe logs {directory.path})"),
    ]
    if config.trackers.tensorboard:
        facts.append(("tensorboard", f"tensorboard --logdir {directory.path}"))
    if config.trackers.wandb != "off":
        facts.append(("wandb", f"project {config.trackers.wandb_project}, {config.trackers.wandb}"))
    facts.append(("model", config.model.path))
    if config.ray.address is not None:  # in a cluster that is joined, GPUs are elsewhere
        return [*facts, *_layout(config, on_gpus=True)]
    capability = visible_capability()
    kernels = support_line(capability) + _named_kernels(config)
    return [*facts, *_layout(config, on_gpus=capability is not None), ("kernels", kernels)]


def _named_kernels(config: Config) -> str:
    """What the configuration says otherwise."""
    gdn, sglang = config.actor.gdn_backend, {} if config.sft else config.rollout.engine.sglang
    named = [f"actor.gdn_backend {gdn}"] if gdn != "auto" else []
    named += [f"{name} {value}" for name, value in sglang.items() if name.endswith("_backend")]
    return "; but as set " + ", ".join(named) if named else ""


def _layout(config: Config, on_gpus: bool) -> list[tuple[str, str]]:
    layout = ActorLayout.of(config.actor)
    sizes = {
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "context": layout.context_parallel,
        "expert": layout.expert_parallel,
        "data": layout.data_parallel,
    }
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    actor = _count(layout.processes, "process", "processes") + (f" ({split})" if split else "")
    facts = [("actor", f"{actor}, {config.actor.dtype}")]
    if config.sft is None:
        engine = config.rollout.engine
        kind = "GPUs" if on_gpus else "processes"
        each = f" of {engine.tensor_parallel} {kind}" if engine.tensor_parallel > 1 else ""
        shared = f", {'on' if on_gpus else 'as if on'} the actor's GPUs" if config.ray.colocate else ""
        engines = _count(config.rollout.engines, "engine", "engines")
        facts.append(("rollout", f"{engines}{each}, {engine.dtype}, {config.rollout.mode}{shared}"))
    return facts


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
