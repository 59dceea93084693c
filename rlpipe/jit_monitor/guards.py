"""Known causes of endless recompilation, refused before they start."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from rlpipe.shared.errors import ActorError

_FIRST_SOUND_FLASH_ATTENTION_4 = Version("4.0.0b28")


def refuse_recompiling_flash_attention(installed: str | None = None) -> None:
    """ActorError if flash-attn-4 is older than 4.0.0b28, whose cache keys hold tensors and never match twice.

    installed: its version; the environment's by default. Nothing to refuse if it is not installed.
    See Dao-AILab/flash-attention issues 2571 and 2635.
    """
    if installed is None:
        try:
            installed = version("flash-attn-4")
        except PackageNotFoundError:
            return
    if Version(installed) < _FIRST_SOUND_FLASH_ATTENTION_4:
        raise ActorError(
            f"flash-attn-4 {installed} compiles its kernels again in every layer and step: "
            f"install {_FIRST_SOUND_FLASH_ATTENTION_4} or newer, or choose another attention backend"
        )


def host_integer(name: str, value: object) -> int:
    """`value` if it is a Python int, as lengths given to attention kernels must be; ActorError otherwise.

    A tensor in a kernel's cache key never equals its predecessor, so each call compiles.
    """
    if type(value) is not int:
        raise ActorError(f"{name} is a {type(value).__name__}, expected a Python int from the pack's host-side lengths")
    return value
