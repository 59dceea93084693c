"""Which backend Gated DeltaNet layers run on, decided before anything is loaded: from the machine, and from the model.

What the kernels ask for: fla-core 0.6 (torch 2.7, triton 3.3, no float32), flash-qla 0.1.3 (torch 2.8, CUDA 12.8, SM90,
SM100 or SM103, tilelang 0.1.11, bfloat16 or float16, heads of 128 channels; its backward pass is missing on SM120).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal

import torch
from packaging.version import Version

from rlpipe.model.description import GatedDeltaNetSizes
from rlpipe.shared.errors import ConfigError, ResourceError

GdnBackend = Literal["torch", "fla", "flashqla"]
_PACKAGES = ("fla-core", "triton", "flash-qla", "tilelang")


@dataclass(frozen=True)
class Machine:
    """capability: of the GPU, for instance (9, 0), None without CUDA; cuda: the version torch was built for."""

    capability: tuple[int, int] | None
    torch: str
    cuda: str | None
    packages: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> "Machine":
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        return cls(capability, torch.__version__, torch.version.cuda, _installed())


@dataclass(frozen=True)
class _Needs:
    """At least these versions; one of these capabilities, or any from `least_capability` on."""

    torch: str
    cuda: str
    packages: Mapping[str, str]
    capabilities: tuple[tuple[int, int], ...] = ()
    least_capability: tuple[int, int] = (0, 0)
    head_channels: int | None = None
    most_key_channels: int | None = None


_NEEDS: dict[str, _Needs] = {
    "fla": _Needs(
        torch="2.7",
        cuda="12.0",
        packages={"fla-core": "0.6", "triton": "3.3"},
        least_capability=(8, 0),
        most_key_channels=256,
    ),
    "flashqla": _Needs(
        torch="2.8",
        cuda="12.8",
        packages={"flash-qla": "0.1.3", "tilelang": "0.1.11", "fla-core": "0.6"},
        capabilities=((9, 0), (10, 0), (10, 3)),
        head_channels=128,
    ),
}


@dataclass(frozen=True)
class GdnChoice:
    """The backend that will run, and a sentence that says so, for the user."""

    backend: GdnBackend
    note: str


def choose_gdn_backend(
    requested: Literal["auto", "torch", "fla", "flashqla"],
    sizes: GatedDeltaNetSizes,
    dtype: str,
    machine: Machine | None = None,
) -> GdnChoice:
    """`auto` is fla where it can run, else torch, which runs everywhere. machine: this one when None.

    Raises:
        ResourceError: the machine lacks what the requested backend needs.
        ConfigError: the model's heads or `actor.dtype` do not suit it.
    """
    there = machine or Machine.here()
    if requested == "auto":
        reason = _machine_lacks("fla", there) or _model_lacks("fla", sizes, dtype)
        if not reason:
            return GdnChoice("fla", _sentence("fla", there))
        why = "" if there.capability is None else f", because fla cannot ({reason}): expect many times its run time"
        return GdnChoice("torch", f"Gated DeltaNet layers run on plain torch{why}")
    if requested == "torch":
        return GdnChoice("torch", "Gated DeltaNet layers run on plain torch")
    if reason := _machine_lacks(requested, there):
        raise ResourceError(f"actor.gdn_backend = {requested}: {reason}; use auto, or install what is missing")
    if reason := _model_lacks(requested, sizes, dtype):
        raise ConfigError(f"actor.gdn_backend = {requested}: {reason}; use auto or torch")
    return GdnChoice(requested, _sentence(requested, there))


def _machine_lacks(backend: str, machine: Machine) -> str:
    """Why the backend cannot run on the machine, empty where it can."""
    needs = _NEEDS[backend]
    if machine.capability is None or machine.cuda is None:
        return "it needs CUDA, which is not available"
    found = "SM{}{}".format(*machine.capability)
    if needs.capabilities and machine.capability not in needs.capabilities:
        return f"it runs on {', '.join('SM{}{}'.format(*one) for one in needs.capabilities)}, and this GPU is {found}"
    if machine.capability < needs.least_capability:
        return f"it needs SM{needs.least_capability[0]}{needs.least_capability[1]} or newer, and this GPU is {found}"
    versions = {"torch": machine.torch, "CUDA": machine.cuda, **machine.packages}
    for name, least in {"torch": needs.torch, "CUDA": needs.cuda, **needs.packages}.items():
        if name not in versions:
            return f"it needs {name} {least} or newer, which is not installed"
        if Version(versions[name]).release < Version(least).release:
            return f"it needs {name} {least} or newer, and {versions[name]} is installed"
    return ""


def _model_lacks(backend: str, sizes: GatedDeltaNetSizes, dtype: str) -> str:
    """Why the backend cannot compute the model's layers, empty where it can."""
    needs = _NEEDS[backend]
    if dtype == "float32":
        return "it computes in bfloat16 only, and actor.dtype is float32"
    if needs.head_channels and (sizes.key_dim, sizes.value_dim) != (needs.head_channels,) * 2:
        return (
            f"it needs heads of {needs.head_channels} channels, and the model has linear_key_head_dim {sizes.key_dim} "
            f"and linear_value_head_dim {sizes.value_dim}"
        )
    if needs.most_key_channels and sizes.key_dim > needs.most_key_channels:
        return f"it takes at most {needs.most_key_channels} channels, and linear_key_head_dim is {sizes.key_dim}"
    return ""


def _sentence(backend: str, machine: Machine) -> str:
    versions = ", ".join(f"{name} {machine.packages[name]}" for name in _NEEDS[backend].packages)
    return f"Gated DeltaNet layers run on {backend} ({versions})"


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
