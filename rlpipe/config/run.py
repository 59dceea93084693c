"""The run itself: length, seed, folders, deadlines, tracking."""

from ipaddress import ip_address
from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from rlpipe.config.base import Name, RayAddress, Section
from rlpipe.shared.secret_text import is_secret_key, secret_values

AdapterUpdates = Literal["auto", "merged", "alone"]


class WeightSyncConfig(Section):
    """How new weights reach the engines."""

    bucket_bytes: int = Field(512 * 2**20, ge=2**20)
    """Weights travel in flattened buckets of at most this size, a larger tensor in one of its own. Two are under way at
    a time; a colocated run keeps that much of each GPU's memory for them. Where n processes of the actor send, each
    fills buckets of 1 / n of it (16 MiB at least), and an engine has as many bytes under way as from one."""

    verify: bool = False
    """Compare checksums of what was sent and what the engines hold after every update."""

    adapters: AdapterUpdates = "auto"
    """How `actor.lora` reaches the engines. `merged`: in the model's weights, all of which are sent every time.
    `alone`: to engines that keep adapters beside the model, which is sent once; generation then multiplies by them,
    too. `auto`: what takes less time, tried at the start of a run where engines can serve the adapters
    (docs/lora.md)."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval_iterations: int = Field(0, ge=0)
    """Save after every N iterations and after the last one; 0 saves only when a signal ends the run."""

    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""

    save_hf: Literal["final", "every", "best", "never"] = "final"
    """Write the policy in Hugging Face layout: after the last iteration (`RUN/policy`); `every`: also with each
    checkpoint (`RUN/policies/iteration_*`, all kept); `best`: also the one with the best `best_metric`
    (`RUN/best_policy`). `rlpipe export` makes one of any checkpoint later."""

    best_metric: str | None = None
    """Metric of an evaluation that `best` goes by, for instance `eval/gsm8k/accuracy`; when empty, the accuracy on the
    first of `eval.datasets`, or the mean reward where its grader gives numbers alone. Of equal ones the earliest is
    kept."""


class TrackersConfig(Section):
    """Where metrics go besides `metrics.jsonl` in the run folder."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; the API key is taken from the environment, never from a config."""

    wandb_project: str = "rlpipe"
    """Project in Weights & Biases."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run folder."""

    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Port at which a Prometheus server may scrape the newest metrics; 0 takes a free one, which the console and
    `prometheus.json` in the run folder tell. Not served when empty."""

    prometheus_address: str = "127.0.0.1"
    """Address of this machine to listen at. Without encryption or key: beyond the loopback, only in a network whose
    machines may read the metrics."""

    @field_validator("prometheus_address")
    @classmethod
    def _is_one_address(cls, value: str) -> str:
        try:
            ip_address(value)
        except ValueError:
            raise ValueError(
                f"{value[:80]!r} is no IP address: give one of this machine, for instance 127.0.0.1"
            ) from None
        return value


class DeadlinesConfig(Section):
    """Longest time of each remote call; beyond it the run ends with the stack of the slow worker."""

    start_seconds: float = Field(600, gt=0)
    """Starting engines and actor, loading weights."""

    rollout_seconds: float = Field(3600, gt=0)
    """Generating one iteration's responses, or one evaluation."""

    train_seconds: float = Field(3600, gt=0)
    """One training or log-probability call."""

    weight_sync_seconds: float = Field(600, gt=0)
    """One weight update."""

    checkpoint_seconds: float = Field(1800, gt=0)
    """Saving or loading a checkpoint."""


class RayConfig(Section):
    """The Ray cluster."""

    address: RayAddress | None = None
    """`auto` or host:port joins a cluster; empty starts a local one that ends with the run."""

    colocate: bool = False
    """Engines share the GPUs of the actor's processes instead of having their own, each the next `tensor_parallel` of
    them, and read new weights from their memory."""

    sleep: Literal["auto", "always", "never"] = "auto"
    """Colocated engines and actor take turns in device memory: engines free weights and KV cache while the actor works,
    the actor frees parameters and gradients while they generate. `auto`: on GPUs."""

    start: Literal["after", "beside"] = "after"
    """When an actor that shares the memory of GPUs is built: after the engines have started, or while they start, where
    its model has room beside the pools that their requests need. The engines are the same either way."""

    object_store_bytes: int = Field(200 * 2**20, ge=80 * 2**20)
    """Object store of a local cluster."""

    cpus: int | None = Field(None, ge=1)
    """Logical CPUs of a local cluster; as many as the run's workers need when empty."""

    nodes: int = Field(1, ge=1)
    """Wait until N nodes have joined the cluster, within `deadlines.start_seconds`."""

    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the workers on all nodes. Secrets are refused: Ray logs these variables."""

    @field_validator("environment")
    @classmethod
    def _holds_no_secret(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not name or "=" in name:
                raise ValueError(f"{name!r} cannot be the name of an environment variable; correct it")
            if is_secret_key(name) or any(secret_values(value[name])):
                raise ValueError(f"{name} is a secret, and Ray logs these variables: export it where the nodes start")
        return value

    def shares_memory(self, gpus: bool) -> bool:
        """Whether engines and actor sleep while the others work. gpus: they run on GPUs."""
        return self.colocate and (self.sleep == "always" or (self.sleep == "auto" and gpus))


class RunConfig(Section):
    """Name and length of the run."""

    name: Name
    """Name of the run; its folder is `directory/name`. Letters, digits and `_ - . + @ =`, at most 128 bytes."""

    directory: str = "runs"
    """Folder of all runs."""

    iterations: int = Field(ge=1)
    """Iterations in all, resumed ones included."""


class TraceConfig(Section):
    """A file `traces/iteration_*.json` in the run folder for Perfetto: driver, engines and actor processes together."""

    iterations: list[PositiveInt] = Field(default_factory=list)
    """Iterations of which a timeline is written."""
