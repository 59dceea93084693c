"""Memory of a GPU and of a node by part."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlpipe.config.cluster import ClusterConfig
from rlpipe.config.rollout import EngineConfig
from rlpipe.config.root import Config
from rlpipe.estimate.activations import Passes, kept_bytes, recomputed_bytes, working_bytes
from rlpipe.estimate.engine_pools import needed_pools, pools_within, states_per_request
from rlpipe.estimate.parameters import (
    Parameters,
    fp8_parameters,
    model_parameters,
    prediction_parameters,
    stage_parameters,
)
from rlpipe.flops.layers import GatedDeltaNet, GroupedQueryAttention, MixtureOfExperts
from rlpipe.flops.shape import ModelShape
from rlpipe.flops.trained import UntrainedWork
from rlpipe.model.description import ModelDescription
from rlpipe.model.hub import is_cached
from rlpipe.model.model_reader import describe_model
from rlpipe.shared.project_files import MODELS

_BYTES = {"float32": 4, "bfloat16": 2}
_CUDA_CONTEXT = 4_500_000_000  # of one process: context, loaded kernels, fragments, NCCL's buffers (tests/gpu)
# What NCCL takes more in a process with groups that exchange activations, each with buffers of its own. Of one record,
# benchmarks/results/whole_step_table.cuda2.json: 8.7 GB beside the actor's tensors, where those of one GPU have 4.7 to
# 6.7.
_EXCHANGING_GROUPS = 2_500_000_000
_TENSOR_GROUPS = 1_000_000_000  # with TP too, as in whole_step_table.cuda4.json and whole_step_35b.cuda4.json
_ENGINE_WORKSPACE = 2_500_000_000  # CUDA graphs, logits and workspaces of SGLang outside of its static share
_ACTOR_PROCESS = 2_500_000_000  # torch, Megatron and CUDA's host side, without tensors
_ENGINE_PROCESS = 3_500_000_000
_DRIVER = 2_000_000_000
_LOGITS_COPIES = 4  # in float32, where no kernel passes over them
_SCALE_BYTES_PER_WEIGHT = 4 / 128**2  # of FP8 by blocks
_PADDED_STATES = 1.01
_MASTER_BYTES = 4  # the optimizer's own copy of a parameter, also of a float32 one
_GRADIENT_BYTES = 4
_PLANNED_WITHIN = 1.1  # bytes are planned within 10 %
_LOADED_AT_A_TIME = 4_000_000_000  # what of a tensor is there more than once while it is read and looked at
_FLOAT8_BYTES = 1 + 1 / 32  # a value, and its share of a block's exponent (actor/layers/float8_weight.py)

USED_SHARE_OF_SPARE = 0.8
"""Of the memory that engines leave free after their warm-up, what a colocated actor may hold while they generate."""

BESIDE_TORCH_BYTES = 3 * 2**29
"""Of that, what is not for tensors: the CUDA context, kernels, NCCL's buffers."""

STAYING_PARTS = ("CUDA and NCCL", "weight sync")
"""Of a colocated actor's memory, what is there whoever works."""

FRAGMENTS_BYTES = 1_000_000_000
"""Of what torch has mapped, where gradients and states stay in it."""

_OF_PASSES = ("activations", "logits chunk", "layer at work", "recomputed layer")
"""Of the actor's memory, what is free again when the optimizer works."""

ENGINE_STAYS = "graphs and workspace"
"""Of an engine's memory, what is there also while it sleeps."""

STATES_RESERVE_BYTES = 4 * 2**30
"""Device memory that optimizer states leave alone beyond what the passes take (actor/device_memory.py)."""

UPDATE_SLOTS = 2
SLOT_ELEMENTS = 64 * 2**20
"""Of what lies in host memory, what is on the device at a time in an update (actor/streamed_adam.py)."""


@dataclass(frozen=True)
class Model:
    """The model as the planner needs it. `architecture`: the class that config.json names.

    adapters: all that is trained where it is not the model itself; `untrained` is what that saves of the passes.
    trained_experts: whether routed experts or adapters beside them are.
    """

    shape: ModelShape
    tied: bool
    architecture: str = ""
    description: ModelDescription | None = None
    adapters: Parameters | None = None
    untrained: UntrainedWork = UntrainedWork()
    trained_experts: bool = True

    @property
    def parameters(self) -> int:
        return model_parameters(self.shape, self.tied).total

    @property
    def trained(self) -> int:
        """Parameters that have gradients and optimizer states."""
        return self.parameters if self.adapters is None else self.adapters.total

    def trained_in_stage(self, pipeline: int) -> Parameters:
        """Those of the largest pipeline stage; adapters lie about evenly in all."""
        if self.adapters is None:
            return stage_parameters(self.shape, self.tied, pipeline)
        share = (self.adapters.tensor, self.adapters.experts, self.adapters.whole)
        return Parameters(*(math.ceil(count / pipeline) for count in share))

    @property
    def is_dense(self) -> bool:
        """Whether no layer has experts or Gated DeltaNet."""
        return not self.gdn_layers and not any(
            isinstance(layer.feed_forward, MixtureOfExperts) for layer in self.shape.layers
        )

    @property
    def attention_layers(self) -> list[GroupedQueryAttention]:
        return [layer.mixer for layer in self.shape.layers if isinstance(layer.mixer, GroupedQueryAttention)]

    @property
    def gdn_layers(self) -> list[GatedDeltaNet]:
        return [layer.mixer for layer in self.shape.layers if isinstance(layer.mixer, GatedDeltaNet)]


@dataclass(frozen=True)
class Engine:
    """What an engine's memory allows. Without parts there is no engine: a supervised run.

    states: slots for recurrent states, None without such layers. most_requests: that may run at a time; as many as
    `concurrency` of them have room until each has its longest. fills_share: its pools are as large as SGLang finds room
    for, and not as large as planned.
    """

    parts: Mapping[str, int]
    kv_tokens: int
    states: int | None
    most_requests: int
    concurrency: int
    fills_share: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes by part: of a GPU (a process on a CPU) of the actor and of an engine, of a node, of the disk."""

    actor: Mapping[str, int]
    engine: Engine
    host: Mapping[str, int]
    disk: Mapping[str, int]


def load_model(path: str) -> Model:
    """The model at `path` or, before it is there, the one of that name in configs/models. Raises ModelError.

    Of a hub model that is in neither place, its config.json alone is downloaded.
    """
    model = describe_model(path_or_bundled(path))
    return Model(model.shape, model.tied_embeddings, model.architecture, model)


def path_or_bundled(path: str) -> str:
    """`path`, or the name of the model in configs/models that it is before it is there."""
    here = Path(path).exists() or is_cached(path)
    return Path(path).name if not here and (MODELS / Path(path).name).exists() else path


def plan_memory(config: Config, model: Model, cluster: ClusterConfig) -> Memory:
    """By part. On a CPU the actor's parts are of one process, with the optimizer among them."""
    optimizer = _optimizer_bytes(config, model)
    actor = _actor_parts(config, model, on_gpu=cluster.gpus > 0)
    device, host = optimizer * (1 - _offloaded(config)), optimizer * _offloaded(config)
    if cluster.gpus:
        passes = sum(actor.get(name, 0) for name in _OF_PASSES)
        update = max(0, _update_bytes(config, model) - passes)
        actor |= {"optimizer": int(device), "update beyond passes": update, "CUDA and NCCL": _context_bytes(config)}
    else:
        actor |= {"optimizer": int(optimizer)}
    memory = Memory(_present(actor), _engine(config, model, cluster), {}, _disk_parts(config, model))
    return replace(memory, host=_host_parts(config, model, cluster, int(host), memory))


def build_bytes(config: Config, model: Model) -> int:
    """The most device memory that a process of the actor takes while it builds its share of the policy.

    Parameters are there twice while Megatron moves those that are trained into its buffers.
    """
    actor = config.actor
    element = _BYTES[actor.dtype]
    own = stage_parameters(model.shape, model.tied, actor.parallel.pipeline).on_rank(actor.parallel)
    trained = model.trained_in_stage(actor.parallel.pipeline).on_rank(actor.parallel)
    states = _optimizer_bytes(config, model) * (1 - _offloaded(config))
    tensors = own * element + trained * (2 * element + _GRADIENT_BYTES) + states
    return int(tensors * _PLANNED_WITHIN) + _context_bytes(config) + _LOADED_AT_A_TIME


def kept_state_bytes(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> int:
    """Of the optimizer's states in host memory, what stays on a GPU beside the passes because there is room, so that it
    need not be fetched: no part of what a run needs. In whole slots, of which the last ones are not full."""
    limit = config.actor.optimizer.device_cache_gigabytes
    taken = sum(memory.actor.values()) + _engine_bytes_beside_passes(config, cluster, memory) + STATES_RESERVE_BYTES
    room = cluster.node.gpu_memory_gigabytes * 1e9 - taken
    room = max(0.0, min(room, math.inf if limit is None else limit * 1e9))
    kept = 0.0
    for elements, count in _slots(config, model) if cluster.gpus else ():
        size = elements * _state_bytes(config)
        kept += min(count, (room - kept) // size) * size
    return int(kept)


def _slots(config: Config, model: Model) -> list[tuple[float, int]]:
    """Of each half of the optimizer, all but experts and experts: elements of a slot of device memory, and how many
    slots hold all of its states. One is for what has no weight decay, as little as that is, and is counted for all but
    experts."""
    shards = [shard * _offloaded(config) for shard in _optimizer_shards(config, model)]
    sizes = [(min(shard, SLOT_ELEMENTS), shard) for shard in shards]
    return [(size, math.ceil(shard / size) + (half == 0)) for half, (size, shard) in enumerate(sizes) if size > 0]


def held_beside_engines_bytes(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> int:
    """Of a GPU that it shares, what the actor goes on holding while engines generate because there is room, so that it
    need not be fetched or mapped anew: beside CUDA's own and what weights are sent through, which never go.

    What torch has mapped for the passes stays where all of it has room. Else activations are given back while the
    optimizer works, gradients too where more than a few states had to go for them, and of optimizer states as much
    stays as there is room (`actor/device_memory.py`).
    """
    if config.sft or not config.ray.shares_memory(gpus=cluster.gpus > 0) or not cluster.gpus:
        return 0
    room, weights = room_beside_engines(config, cluster, memory), _weight_bytes(memory)
    if weights > room:
        return 0
    kept = kept_state_bytes(config, model, cluster, memory)
    passes = sum(size for name, size in memory.actor.items() if name not in STAYING_PARTS)
    if passes + kept + FRAGMENTS_BYTES <= room:
        return passes + kept
    states = states_beside_engines_bytes(config, model, cluster, memory)
    return weights + states + (memory.actor["gradients"] if gradients_stay(config, model, cluster, memory) else 0)


def states_beside_engines_bytes(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> int:
    """Of the optimizer's states that have room beside the passes, what stays on a GPU while engines generate."""
    kept = kept_state_bytes(config, model, cluster, memory)
    if config.sft or not config.ray.shares_memory(gpus=cluster.gpus > 0):
        return kept
    room = room_beside_engines(config, cluster, memory) - _weight_bytes(memory)
    return min(kept, int(states_room_bytes(max(0.0, room), memory.actor["gradients"], kept)))


def gradients_stay(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> bool:
    """Whether their memory stays mapped while engines generate, so that it need not be mapped anew."""
    room, kept = room_beside_engines(config, cluster, memory), kept_state_bytes(config, model, cluster, memory)
    room -= _weight_bytes(memory)
    return states_room_bytes(room, memory.actor["gradients"], kept) < room


def states_room_bytes(room: float, gradients: float, states: float) -> float:
    """Of `room` beside weights, what optimizer states may take while engines generate, where there are `states` bytes
    of them that could stay.

    What does not stay is downloaded and unmapped before engines wake, and comes back beside the passes. Unmapping and
    mapping gradients takes as long as that does for a third of their bytes (configs/clusters/nodes/h200.yaml), so
    their memory stays mapped where no more than a quarter has to go.
    """
    beside = room - gradients - FRAGMENTS_BYTES
    return beside if beside >= 0 and states - beside <= gradients / 4 else room


def _weight_bytes(memory: Memory) -> int:
    return sum(memory.actor.get(name, 0) for name in ("parameters", "adapters", "optimizer"))


def room_beside_engines(config: Config, cluster: ClusterConfig, memory: Memory) -> float:
    """Bytes of a GPU that the actor may hold in tensors that come and go, while engines generate."""
    total = cluster.node.gpu_memory_gigabytes * 1e9
    if config.sft or not config.ray.shares_memory(gpus=cluster.gpus > 0):
        return total - sum(memory.actor.values())
    taken = _held_by_engines(config, cluster, memory.engine) + memory.actor["CUDA and NCCL"]
    spare = max(0.0, total - taken)
    return max(0.0, USED_SHARE_OF_SPARE * spare - BESIDE_TORCH_BYTES - memory.actor.get("weight sync", 0))


def _held_by_engines(config: Config, cluster: ClusterConfig, engine: Engine) -> float:
    """Of a GPU. Pools that do not hold what requests can need are planned with something to spare."""
    planned = sum(engine.parts.values())
    if not engine.fills_share:
        return planned
    share = config.rollout.engine.memory_share * cluster.node.gpu_memory_gigabytes * 1e9
    return max(planned, share + engine.parts.get(ENGINE_STAYS, 0))


def offloaded_bytes(config: Config, model: Model, cluster: ClusterConfig) -> float:
    """Optimizer states of a rank that have their place in host memory; 0 on a CPU, where all have."""
    return _optimizer_bytes(config, model) * _offloaded(config) if cluster.gpus else 0.0


def host_state_bytes(config: Config, model: Model) -> int:
    """The same, if the rank has a GPU, with room for what Megatron fills its buffers up with."""
    return int(_PADDED_STATES * _optimizer_bytes(config, model) * _offloaded(config))


def _engine_bytes_beside_passes(config: Config, cluster: ClusterConfig, memory: Memory) -> int:
    """What engines on the actor's GPUs hold while it works."""
    if config.sft or not config.ray.colocate:
        return 0
    parts = memory.engine.parts
    asleep = config.ray.shares_memory(gpus=cluster.gpus > 0)
    return parts.get(ENGINE_STAYS, 0) if asleep else sum(parts.values())


def _context_bytes(config: Config) -> int:
    """Of a process of the actor on a GPU, beside its tensors."""
    parallel = config.actor.parallel
    groups = _EXCHANGING_GROUPS if parallel.exchanges_activations else 0
    return _CUDA_CONTEXT + groups + (_TENSOR_GROUPS if parallel.tensor > 1 else 0)


def _offloaded(config: Config) -> float:
    return config.actor.optimizer.cpu_offload_fraction


def _actor_parts(config: Config, model: Model, on_gpu: bool) -> dict[str, int]:
    actor = config.actor
    element = _BYTES[actor.dtype]
    own = stage_parameters(model.shape, model.tied, actor.parallel.pipeline).on_rank(actor.parallel)
    trained = model.trained_in_stage(actor.parallel.pipeline).on_rank(actor.parallel)
    rows = model.shape.vocab_size // actor.parallel.tensor
    # A chunk's logits in the backward pass, whose place their gradient takes; the head's gradient, that of a chunk and,
    # in float32, the sum. Never at the same time as a layer that is computed again.
    chunk = actor.head_chunk_tokens(on_gpu)
    head = chunk * rows * (element if on_gpu else _LOGITS_COPIES * 4)
    head += rows * model.shape.hidden_size * (element + 4) if model.adapters is None else 0
    fused = on_gpu and actor.dtype == "bfloat16"
    passes = Passes(actor, element, fused, model.adapters is None, model.trained_experts)
    again = recomputed_bytes(model.shape, passes)
    layer = again + working_bytes(model.shape, passes)
    layer_name = "recomputed layer" if again else "layer at work"
    return {
        "parameters": _parameter_bytes(config, model, own),
        "adapters": 0 if model.adapters is None else trained * element,
        "gradients": trained * _GRADIENT_BYTES,
        "activations": kept_bytes(model.shape, passes),
        layer_name if layer > head else "logits chunk": max(layer, head),
        "weight sync": 0 if config.sft else 2 * min(config.weight_sync.bucket_bytes, model.parameters * element),
    }


def _parameter_bytes(config: Config, model: Model, own: int) -> int:
    """Of a rank's `own` parameters, frozen projections among them as `actor.lora.base` stores them."""
    actor = config.actor
    element = _BYTES[actor.dtype]
    if actor.lora is None or actor.lora.base == "same":
        return own * element
    both = actor.parallel.pipeline == 1 and not model.tied
    vocabulary = (1 + both) * model.shape.vocab_size * model.shape.hidden_size // actor.parallel.tensor
    return vocabulary * element + math.ceil((own - vocabulary) * _FLOAT8_BYTES)


def _optimizer_bytes(config: Config, model: Model) -> float:
    """Masters and moments of one rank."""
    return sum(_optimizer_shards(config, model)) * _state_bytes(config)


def _update_bytes(config: Config, model: Model) -> int:
    """What an update has on the device of states that lie in host memory, and of gradients in float32. Experts have an
    optimizer of their own."""
    shards = [shard * _offloaded(config) for shard in _optimizer_shards(config, model)]
    slots = sum(min(shard, UPDATE_SLOTS * SLOT_ELEMENTS) for shard in shards)
    return int(slots * _state_bytes(config) + min(max(shards), SLOT_ELEMENTS) * _GRADIENT_BYTES)


def _optimizer_shards(config: Config, model: Model) -> tuple[float, float]:
    """Trained parameters of one rank, sharded over the ranks that hold the same ones: of all but experts, and of
    experts."""
    actor, parallel = config.actor, config.actor.parallel
    stage = model.trained_in_stage(parallel.pipeline)
    per_stage = actor.processes // parallel.pipeline
    dense = (stage.tensor / parallel.tensor + stage.whole) / (per_stage // parallel.tensor)
    return dense, stage.experts / per_stage


def _state_bytes(config: Config) -> int:
    """Master and both moments of one parameter."""
    return _MASTER_BYTES + 2 * _BYTES[config.actor.optimizer.moments_dtype]


def _engine(config: Config, model: Model, cluster: ClusterConfig) -> Engine:
    if config.sft:
        return Engine({}, 0, None, 0, 0)
    engine = config.rollout.engine
    weights = _engine_bytes(engine, model.parameters, model.shape)
    drafting = 0
    if engine.draft.predicts:
        one_layer = replace(model.shape, layers=model.shape.layers[-1:])
        drafting = _engine_bytes(engine, prediction_parameters(model.shape).total, one_layer)
    longest = config.longest_sequence_tokens
    requests = engine.max_running_requests
    if not cluster.gpus:
        cached = engine.model_copy(update={"sglang": engine.sglang | {"disable_radix_cache": True}})
        pools = needed_pools(model.shape, cached, model.architecture, requests, longest)
        workspace = {}
    else:
        room = int(cluster.node.gpu_memory_gigabytes * 1e9 * engine.memory_share) - weights - drafting
        needed = needed_pools(model.shape, engine, model.architecture, requests + 1, longest, config.reuses_prefixes)
        pools = pools_within(needed, room)
        workspace = {ENGINE_STAYS: _ENGINE_WORKSPACE}
    if pools.states is not None and cluster.gpus:
        slots = states_per_request(engine, model.architecture, config.reuses_prefixes)
        requests = min(requests, pools.states // slots)
    parts = {
        "parameters": weights,
        "prediction layer": drafting,
        "KV pool": pools.kv_bytes,
        "GDN states": pools.states_bytes,
        "states of drafts": pools.verified_bytes,
        **workspace,
    }
    running = min(requests, pools.kv_tokens // longest)
    return Engine(_present(parts), pools.kv_tokens, pools.states, requests, running, fills_share=not pools.fits)


def _engine_bytes(engine: EngineConfig, parameters: int, shape: ModelShape) -> int:
    """Of weights on one rank. shape: of the layers among them."""
    saved = fp8_parameters(shape, engine.quantization) * (1 - _SCALE_BYTES_PER_WEIGHT)
    return int((parameters * _BYTES[engine.dtype] - saved) / engine.tensor_parallel)


def _host_parts(config: Config, model: Model, cluster: ClusterConfig, offloaded: int, memory: Memory) -> dict[str, int]:
    """Of the fullest node: actor processes fill nodes one after the other."""
    processes, engines = config.actor.processes, config.rollout.engines * config.rollout.engine.tensor_parallel
    engines = 0 if config.sft else engines
    if cluster.gpus:
        here = min(processes, cluster.node.gpus)
        engines_here = min(engines, cluster.node.gpus if config.ray.colocate else cluster.node.gpus - here)
        leaving = _copied_to_host_bytes(config, model, cluster, memory)
        parts = {"optimizer": here * offloaded, "weights while engines work": here * leaving}
    else:
        here, engines_here = processes, engines
        parts = {
            "actor": here * sum(memory.actor.values()),
            "engines": engines_here * sum(memory.engine.parts.values()),
        }
    if _keeps_reference(config):
        own = model.trained_in_stage(config.actor.parallel.pipeline).on_rank(config.actor.parallel)
        copies = 2  # its own, and the policy's while it is in their place
        parts["reference policy"] = copies * here * own * _BYTES[config.actor.dtype]
    saved = model.parameters if config.actor.lora is None else model.trained
    parts |= {
        "weights being saved": min(saved * _BYTES[config.actor.dtype], here * memory.actor["parameters"]),
        "object store": config.ray.object_store_bytes,
        "processes": here * _ACTOR_PROCESS + engines_here * _ENGINE_PROCESS + _DRIVER,
    }
    return _present(parts)


def _copied_to_host_bytes(config: Config, model: Model, cluster: ClusterConfig, memory: Memory) -> int:
    """Of a rank, what has no master in host memory and makes room for engines: frozen weights, and what of the
    optimizer lives on the device. Counted also where they would only just stay."""
    if config.sft or not config.ray.shares_memory(gpus=cluster.gpus > 0):
        return 0
    if _weight_bytes(memory) * _PLANNED_WITHIN <= room_beside_engines(config, cluster, memory):
        return 0
    frozen = 0 if model.adapters is None else memory.actor["parameters"]
    return frozen + memory.actor.get("optimizer", 0)


def checkpoint_bytes(config: Config, model: Model) -> int:
    """Of one checkpoint, of all processes together: weights, those of a reference policy, masters and moments."""
    weights = _BYTES[config.actor.dtype] * (2 if _keeps_reference(config) else 1)
    return model.trained * (weights + _state_bytes(config))


def _keeps_reference(config: Config) -> bool:
    return config.algorithm.kl.coefficient > 0 or config.model.reference_path is not None


def _disk_parts(config: Config, model: Model) -> dict[str, int]:
    # One more than are kept: the new one is complete before the oldest goes.
    there = config.checkpoint.keep + 1 if config.checkpoint.interval_iterations else 0
    checkpoints = there * checkpoint_bytes(config, model)
    exported = model.parameters * _BYTES[config.actor.dtype] * _policies(config)
    return _present({"checkpoints": checkpoints, "exported policies": exported})


def _policies(config: Config) -> int:
    """Most policies in Hugging Face layout at a time; one that takes another's place is whole before that goes."""
    interval = config.checkpoint.interval_iterations
    checkpoints = -(-config.run.iterations // interval) if interval else 0
    return {"never": 0, "final": 1, "best": 3, "every": checkpoints + 1}[config.checkpoint.save_hf]


def _present(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}
