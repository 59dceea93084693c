"""The one SGLang version that the stand-ins and patches fit."""

from importlib.metadata import PackageNotFoundError, version

from rlpipe.shared.errors import RolloutError

SGLANG_VERSION = "0.5.17"


def check_sglang_version() -> None:
    """Raises RolloutError unless exactly the supported SGLang is installed."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise RolloutError(f"sglang is not installed; rollout needs sglang=={SGLANG_VERSION}") from None
    if found != SGLANG_VERSION:
        raise RolloutError(
            f"sglang {found} is installed, but rollout/cpu_stand_ins and rollout/sglang_patches/cpu_patches.py fit "
            f"{SGLANG_VERSION} only: install sglang=={SGLANG_VERSION}"
        )
