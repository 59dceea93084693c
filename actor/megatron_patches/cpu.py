"""Run megatron-core 0.16.1 on CPU and gloo. Process-global patches, installed only where there is no CUDA.

Megatron spells out CUDA in five ways; each function below answers one of them with its CPU meaning. Nothing here
changes what is computed. `actor.runtime` decides whether this module is installed.
"""

import contextlib
import importlib
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from actor.megatron_patches.megatron_version import require_megatron_version
from rlpipe.shared.replaced_parts import replaces

replaces(
    "torch.cuda:current_device",
    "torch.cuda:synchronize",
    "torch.cuda:Stream",
    "torch.cuda:Event",
    "torch.cuda:stream",
    "torch.cuda:current_stream",
    "torch.cuda:default_stream",
    "torch.cuda.nvtx:range_push",
    "torch.cuda.nvtx:range_pop",
    why="Megatron asks CUDA for its device and orders work in streams; on a CPU everything has already happened",
    drop_when="Megatron asks torch.accelerator",
)
replaces(
    "torch.cuda.random:get_rng_state",
    "torch.cuda.random:set_rng_state",
    "torch.cuda.random:manual_seed",
    "torch.cuda.random:manual_seed_all",
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state",
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
    why="Megatron keeps CUDA's random states; on a CPU they are the CPU generator's",
    drop_when="Megatron keeps the random states of the current device",
)
replaces(
    "torch._C:TensorBase.type",
    "torch._C:TensorBase.cuda",
    why="Megatron's optimizer compares names of CUDA tensor types and moves tensors by .cuda()",
    drop_when="Megatron compares dtypes and uses .to()",
)

CPU = torch.device("cpu")

_CUDA_LITERALS = replaces(
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
    why='`torch` in them: they write device="cuda" (or pin memory) in a factory call instead of asking for the device',
    drop_when="Megatron asks for the current device",
)


def install_cpu() -> None:
    """Install all CPU patches.

    Raises:
        ActorError: megatron-core is not the version they were written for.
    """
    require_megatron_version()
    _patch_devices_and_streams()
    _patch_random_state()
    _patch_type_names()
    _patch_device_literals()
    # Compiling the few fused element-wise functions costs a C++ build of seconds each and gains nothing here.
    torch.compiler.set_stance("force_eager")


class _Stream:
    """A stream on which everything has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = CPU

    def wait_stream(self, stream: object) -> None:
        return None

    def wait_event(self, event: object) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def record_event(self, event: object = None) -> "_Event":
        return _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event that has already happened."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = CPU

    def record(self, stream: object = None) -> None:
        return None

    def wait(self, stream: object = None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _TypeName(str):
    """The name of a CPU tensor type, equal to its CUDA spelling too: the optimizer compares against that one."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or str.__eq__(self.replace("torch.", "torch.cuda."), other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class _TorchOnCpu(types.ModuleType):
    """`torch` whose tensor factories read device="cuda" as the CPU and ignore pinned memory."""

    FACTORIES = (
        *("arange", "empty", "empty_like", "full", "ones", "ones_like"),
        *("rand", "randn", "tensor", "zeros", "zeros_like"),
    )

    def __init__(self) -> None:
        super().__init__("torch")
        for name in self.FACTORIES:
            self.__dict__[name] = self._on_cpu(getattr(torch, name))

    @staticmethod
    def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return create

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _patch_devices_and_streams() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: None


def _patch_random_state() -> None:
    """The "CUDA" generator is the CPU generator: dropout and recomputation draw from one reproducible state."""
    import megatron.core.tensor_parallel.random as megatron_random

    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # Forking the tracker changes "the CPU state" by design here; the warning would come with every fork.
    logger = logging.getLogger(megatron_random.__name__)
    logger.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_type_names() -> None:
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if args or kwargs else _TypeName(original(self))

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]


def _patch_device_literals() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    proxy = _TorchOnCpu()
    for name in _CUDA_LITERALS.targets:
        module: Any = importlib.import_module(name)
        module.torch = proxy
