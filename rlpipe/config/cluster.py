"""A cluster: what its nodes have, how jobs get there, what runs must know about it. One file in configs/clusters."""

import math
import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlpipe.config.base import RayAddress, Section

_TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")


class NodeConfig(Section):
    """One node."""

    gpus: int = Field(0, ge=0)
    """GPUs; 0 for a CPU cluster."""

    gpu: str | None = None
    """Name of the GPU, as torch tells it, for its peak FLOP/s."""

    gpu_memory_gigabytes: float = Field(0, ge=0)
    """Memory of one GPU, in 10^9 bytes."""

    gpu_memory_gigabytes_per_second: float = Field(2000, gt=0)
    """Bandwidth of that memory, in 10^9 bytes a second."""

    cpus: int = Field(1, ge=1)
    """Logical CPUs that a job may use."""

    memory_gigabytes: float = Field(gt=0)
    """Host memory that a job may use, in 10^9 bytes."""

    disk_gigabytes: float | None = Field(None, gt=0)
    """Room for checkpoints where `run.directory` lies; not checked when empty."""


class NetworkConfig(Section):
    """How fast things move, per GPU or per node, in 10^9 bytes a second, and through which interfaces."""

    gpu_to_gpu_gigabytes_per_second: float = Field(10.0, gt=0)
    """Between GPUs of one node, one direction (NVLink or PCIe)."""

    host_to_gpu_gigabytes_per_second: float = Field(10.0, gt=0)
    """Between host memory and one GPU."""

    node_to_node_gigabytes_per_second: float = Field(1.0, gt=0)
    """Between two nodes, all interfaces together."""

    disk_gigabytes_per_second: float = Field(1.0, gt=0)
    """Writing a checkpoint from one node."""

    socket_interface: str | None = None
    """Interface of NCCL's and Gloo's sockets, for instance `eth0`."""

    infiniband_devices: list[str] = Field(default_factory=list)
    """InfiniBand or RoCE devices that NCCL may use, for instance `mlx5_0`."""


class SpeedsConfig(Section):
    """How fast this code runs on such nodes, for the seconds of `rlpipe plan`: measured by `benchmarks/whole_step.py`,
    to be corrected from its table where a part is off. The defaults are of one H200 with 16 cores."""

    products_share_of_peak: float = Field(0.77, gt=0, le=1)
    """Of the GPU's peak, executed FLOPs of the layers' matrix products in forward and backward passes, all but those
    that follow."""

    experts_share_of_peak: float = Field(0.57, gt=0, le=1)
    """The same of routed experts' products."""

    delta_rule_share_of_peak: float = Field(0.055, gt=0, le=1)
    """The same of Gated DeltaNet's states, counted as the model's own FLOPs, with fla's kernels."""

    attention_share_of_peak: float = Field(0.45, gt=0, le=1)
    """The same of attention's own products, queries with keys and weights with values, which long sequences consist
    of."""

    short_attention_share_of_peak: float = Field(0.21, gt=0, le=1)
    """The same of sequences below 3,000 tokens, whose kernels are others."""

    head_share_of_peak: float = Field(0.58, gt=0, le=1)
    """The same of the vocabulary's products, with the softmax between them."""

    layer_memory_passes: float = Field(3.0, ge=0)
    """How often a forward pass reads or writes the inputs and outputs of a layer's products for all that lies between
    them, of the GPU's memory bandwidth; a backward pass twice as often."""

    pack_overhead_tokens: int = Field(1000, ge=0)
    """What else a pack costs its layers, in tokens: a pack of that size takes twice as long."""

    adapter_memory_passes: float = Field(7, ge=0)
    """How often a training step reads or writes the inputs and outputs of adapted projections for their adapters, whose
    products are narrow: of the GPU's memory bandwidth, beside the layers."""

    host_layer_seconds: float = Field(0.0055, ge=0)
    """Of the host, to start the kernels of a layer with experts or Gated DeltaNet in one pass over a pack, however
    small: no pass takes less. `benchmarks/split_layers.py --packs 2x128` measures it."""

    host_dense_layer_seconds: float = Field(0.0035, ge=0)
    """The same of a layer that has neither. Of its parts within a layer that has both, until it is measured."""

    exchange_share_of_link: float = Field(0.7, gt=0, le=1)
    """Of the link between GPUs, activations that ranks send each other (TP, CP, EP and PP above 1)."""

    split_layer_seconds: float = Field(0.0045, ge=0)
    """What a pass over a pack takes longer in each layer for every doubling of TP x CP, beside the bytes: hosts start
    exchanges one by one, and each waits for the slowest rank. Fitted, with `exchange_share_of_link`, to recorded runs
    of two and four GPUs."""

    decoding_share_of_bandwidth: float = Field(0.97, gt=0, le=1)
    """Of the GPU's memory bandwidth, reading weights and states for a decoding step."""

    attention_share_of_bandwidth: float = Field(0.85, gt=0, le=1)
    """The same for keys and values, with FlashAttention-3."""

    triton_attention_share_of_bandwidth: float = Field(0.63, gt=0, le=1)
    """The same with SGLang's Triton kernels, which engines have where `rollout.engine.sglang` names them, and on a
    Hopper GPU where FlashAttention-3 is not installed."""

    verifying_share_of_bandwidth: float = Field(0.03, gt=0, le=1)
    """The same in a pass that verifies drafts, by Triton's kernel, which has few blocks and waits rather than reads. Of
    one profile; what FlashAttention-3 takes for it is not measured, and planned as the same."""

    layer_step_seconds: float = Field(4.7e-5, ge=0)
    """Of the GPU for one layer in a pass of an engine over few tokens, whose short kernels only follow one another."""

    attention_step_seconds: float = Field(3.5e-5, ge=0)
    """The same for softmax attention alone, beside that and however little it reads."""

    plain_drawing_memory_passes: float = Field(6.5, ge=0)
    """Of the GPU: how often float32 logits are read or written, or how long that would be, until each request has its
    token and log-probability, where none leaves tokens out and engines are not deterministic."""

    drawing_memory_passes: float = Field(30, ge=0)
    """The same where SGLang draws: of the other engines and requests, and when drafts are verified."""

    decoding_step_seconds: float = Field(0.0018, ge=0)
    """Of the host for a decoding step, which runs beside the GPU: scheduling, launches."""

    decoding_request_seconds: float = Field(1.5e-5, ge=0)
    """The same for each request that runs: its token, its log-probability, handing them out."""

    drafting_step_seconds: float = Field(0.0029, ge=0)
    """Of the host beside that, where drafts are made and verified. Fitted to the one recorded run
    (benchmarks/results/rollout_drafts.cuda.json)."""

    all_reduce_step_seconds: float = Field(6.7e-6, ge=0)
    """Of one of the 2 (ranks - 1) steps of a small all-reduce between GPUs of an engine that spans several, beside its
    bytes; two all-reduces a layer and decoding step. Fitted to the recorded run of engines of one, two and four GPUs,
    so that what narrower products lose is in it."""

    host_memory_gigabytes_per_second: float = Field(300, gt=0)
    """Bandwidth of a node's host memory, which bounds all threads together."""

    weight_buffers_gigabytes_per_second: float = Field(420, gt=0)
    """Weights that pass through buffers in the memory of a shared GPU."""

    gathering_share_of_link: float = Field(0.4, gt=0, le=1)
    """Of the link between GPUs, weights that several processes gather for engines on their own GPUs."""

    lone_streaming_share_of_host_link: float = Field(0.82, gt=0, le=1)
    """Of the link between host and GPU, optimizer states that go both ways at once: 39 to 43 GB/s in the recorded runs
    of 8 layers and of Qwen3.5-9B, where copies one way reach 50."""

    streaming_share_of_host_link: float = Field(0.45, gt=0, le=1)
    """The same on several GPUs of a node at once: 20 and 22 GB/s each."""

    weight_sync_share_of_link: float = Field(0.68, gt=0, le=1)
    """Of the link between two GPUs, weights sent to separate engines."""

    mapping_gigabytes_per_second: float = Field(190, gt=0)
    """Memory that a process gives back to its GPU's driver, or takes from it, in large pieces."""

    engine_mapping_gigabytes_per_second: float = Field(800, gt=0)
    """The same of an engine's weights and pools, whose addresses stay."""

    call_seconds: float = Field(0.005, ge=0)
    """Of a call to all workers, whatever it does."""

    cpu_tflops: float = Field(0.05, gt=0)
    """FLOPs of an actor's process on a CPU."""

    cpu_gigabytes_per_second: float = Field(10, gt=0)
    """Memory that one thread of a CPU reads, for what is bound by it: decoding and the optimizer there."""

    cpu_decoding_step_seconds: float = Field(0.005, ge=0)
    """Of a decoding step on a CPU, whatever it computes."""

    gloo_gigabytes_per_second: float = Field(2, gt=0)
    """Weights sent between processes on a CPU."""


class ContainerConfig(Section):
    """A container that all processes of a Slurm job run in. The working folder and rlpipe's own files are mounted at
    their places; `run.directory`, models and data elsewhere need a mount."""

    runtime: Literal["pyxis", "apptainer"]
    """NVIDIA's plugin of Slurm, which runs images with Enroot, or Apptainer, which is a program on all nodes."""

    image: str
    """As the runtime names it: `registry#name:tag` or a .sqsh file, or a .sif file."""

    mounts: list[str] = Field(default_factory=list)
    """Folders of the node in the container: `/data`, `/data:/where` or `/data:/where:ro`."""

    programs: str = "/opt/rlpipe/.venv/bin"
    """Folder of `rlpipe` and `ray` in the image; the default is that of docker/Dockerfile.gpu."""

    options: list[str] = Field(default_factory=list)
    """Further arguments of srun (pyxis) or of `apptainer exec`, for instance `--no-container-mount-home`."""


class SlurmConfig(Section):
    """What sbatch is told."""

    time_limit: str = "24:00:00"
    """Wall-clock limit, as Slurm writes it: minutes, hours:minutes:seconds, days-hours:minutes:seconds, UNLIMITED."""

    partition: str | None = None
    """Partition; the cluster's default when empty."""

    account: str | None = None
    """Account; the user's default when empty."""

    qos: str | None = None
    """Quality of service; the default of user and partition when empty."""

    constraint: str | None = None
    """Features that nodes must have, for instance `h100&ib`."""

    reservation: str | None = None
    """Reservation to run in."""

    requeues: int = Field(1000, ge=0)
    """How often a job that its time limit stops goes back into the queue by itself."""

    container: ContainerConfig | None = None
    """Container of all processes; none when empty."""

    extra: list[str] = Field(default_factory=list)
    """Further arguments of sbatch, for instance `--exclusive`."""

    @property
    def time_limit_seconds(self) -> float:
        """Infinite for UNLIMITED. Raises ValueError for what Slurm cannot read."""
        if self.time_limit.upper() in ("UNLIMITED", "INFINITE"):
            return math.inf
        found = _TIME_LIMIT.fullmatch(self.time_limit)
        if found is None:
            raise ValueError(
                f"time_limit is {self.time_limit!r}: write minutes, hours:minutes:seconds, days-hours:minutes:seconds "
                "or UNLIMITED"
            )
        days, rest = found["days"], [int(part) for part in found["rest"].split(":")]
        # Without days, one or two parts are minutes and seconds; with them, hours come first.
        units = (3600, 60, 1) if days or len(rest) == 3 else (60, 1)
        return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(rest, units, strict=False))

    @model_validator(mode="after")
    def _time_limit_can_be_read(self) -> Self:
        _ = self.time_limit_seconds
        return self


class VolumeConfig(Section):
    """A persistent volume claim and where pods see it."""

    claim: str
    """Name of the claim; all pods must be able to mount it."""

    path: str
    """Mount point."""

    folder: str | None = None
    """Folder of the volume that is mounted; all of it when empty."""

    read_only: bool = False
    """Models and data that no run may change."""


class KubernetesConfig(Section):
    """What a KubeRay RayJob is told. The run's configuration travels in a ConfigMap, so the image need not hold it."""

    image: str
    """Image with rlpipe, see docker/Dockerfile.gpu."""

    namespace: str = "default"
    """Namespace of the job."""

    secret: str | None = None
    """Kubernetes secret whose entries become environment variables of all pods; the manifest holds its name only."""

    image_pull_secrets: list[str] = Field(default_factory=list)
    """Kubernetes secrets of registries that the image is pulled with."""

    service_account: str | None = None
    """Service account of all pods; the namespace's default when empty. It needs no rights, and no token is mounted."""

    volumes: list[VolumeConfig] = Field(default_factory=list)
    """Claims shared by all pods: models, data and `run.directory` must lie on them."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes to use."""

    tolerations: list[dict[str, Any]] = Field(default_factory=list)
    """Taints of those nodes that the pods bear, as Kubernetes writes them."""

    cpus: int | None = Field(None, ge=1)
    """CPUs of a pod; nine tenths of `node.cpus` when empty, since the node's own pods need the rest."""

    memory_gigabytes: float | None = Field(None, gt=0)
    """Memory of a pod, shared memory included; nine tenths of `node.memory_gigabytes` when empty."""

    shared_memory_gigabytes: float = Field(64, gt=0)
    """Size of /dev/shm in a pod; Ray's object store lies there."""

    devices: dict[str, int] = Field(default_factory=dict)
    """Further devices of a pod, by resource name, for instance `rdma/hca_shared: 1` or `vpc.amazonaws.com/efa: 32`.
    With them the container may lock memory (IPC_LOCK), as RDMA needs it."""

    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of all pods, for instance those of a second network."""

    priority_class: str | None = None
    """Priority class of all pods."""

    queue: str | None = None
    """Kueue's local queue that admits the job as a whole."""

    user: int = Field(1000, ge=1)
    """User and group id of all processes; volumes are given to this group."""

    dashboard_token: bool = True
    """Ray, its dashboard included, asks for a token that KubeRay (1.5 or newer) makes for the job."""

    pod: dict[str, Any] = Field(default_factory=dict)
    """Raw pod template, laid over that of every Ray pod. Mappings merge; lists of things with names (containers, of
    which ours is `rlpipe`, volumes, variables) merge by name, other lists are replaced."""

    job: dict[str, Any] = Field(default_factory=dict)
    """Raw RayJob, laid over the whole in the same way."""


class ClusterConfig(Section):
    """All about a cluster. `rlpipe launch CONFIG --cluster NAME` and `rlpipe plan CONFIG --cluster NAME` read it."""

    kind: Literal["local", "ray", "slurm", "kubernetes"]
    """How a job gets there: on this machine, into a Ray cluster that runs already, by sbatch, or as a RayJob."""

    nodes: int = Field(1, ge=1)
    """Nodes of a job."""

    node: NodeConfig
    """What each node has."""

    network: NetworkConfig = NetworkConfig()
    """Bandwidths and interfaces."""

    speeds: SpeedsConfig = SpeedsConfig()
    """What `rlpipe plan` assumes of this code's speed there."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of every process of the job. Never secrets: they appear in what `--dry-run` prints."""

    secrets: list[str] = Field(default_factory=lambda: ["WANDB_API_KEY", "HF_TOKEN"])
    """Names of variables that are handed on where they are set; their values are never printed or written."""

    setup: list[str] = Field(default_factory=list)
    """Shell lines run first on every node, for instance `module load cuda`."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of runs on this cluster, laid over the configuration and under the command line's own."""

    ray_address: RayAddress = "auto"
    """host:port of the head that runs already ("ray" only)."""

    ray_port: int = Field(6379, ge=1024, le=65535)
    """Port of the head that the job starts ("slurm" only)."""

    slurm: SlurmConfig = SlurmConfig()
    """Arguments of sbatch ("slurm" only)."""

    kubernetes: KubernetesConfig | None = None
    """The job's image, volumes and namespace ("kubernetes" only)."""

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.node.gpus

    @model_validator(mode="after")
    def _kubernetes_needs_an_image(self) -> Self:
        if self.kind == "kubernetes" and self.kubernetes is None:
            raise ValueError("kind is 'kubernetes' but there is no section kubernetes: add one with an image")
        if self.kind == "local" and self.nodes > 1:
            raise ValueError(f"kind is 'local' but nodes is {self.nodes}: use 'ray', 'slurm' or 'kubernetes'")
        if self.node.gpus and not self.node.gpu_memory_gigabytes:
            raise ValueError("node.gpus is above 0 but node.gpu_memory_gigabytes is not set: add it")
        return self
