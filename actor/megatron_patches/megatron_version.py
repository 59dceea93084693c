"""The exact megatron-core that the patches of this package were written and tested for."""

from importlib.metadata import version

from rlpipe.shared.errors import ActorError

MEGATRON_VERSION = "0.16.1"


def require_megatron_version() -> None:
    """Raise ActorError unless the installed megatron-core is exactly `MEGATRON_VERSION`."""
    installed = version("megatron-core")
    if installed != MEGATRON_VERSION:
        raise ActorError(
            f"megatron-core {installed} is installed, but actor/megatron_patches replaces parts of "
            f"{MEGATRON_VERSION}: install megatron-core=={MEGATRON_VERSION}"
        )
