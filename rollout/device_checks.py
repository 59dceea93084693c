"""What an engine on a CPU cannot do, said before one starts."""

from rlpipe.config.rollout import EngineConfig
from rlpipe.shared.errors import ConfigError
from rollout.engine_environment import DeviceKind

_ATTENTION_ON_CPU = ("torch_native", "intel_amx")


def check_device(device: DeviceKind, engine: EngineConfig) -> None:
    """Raise ConfigError for settings whose kernels need a GPU."""
    if device != "cpu":
        return
    if engine.draft.method != "off":
        raise ConfigError(
            f"rollout.engine.draft.method is {engine.draft.method!r}, but SGLang's kernels that verify drafts need a "
            "GPU: set it to 'off' on a CPU"
        )
    for name, value in {"quantization": engine.quantization, "kv_cache_dtype": engine.kv_cache_dtype}.items():
        if value not in ("none", "auto"):
            raise ConfigError(
                f"rollout.engine.{name} is {value!r}, for which a CPU engine has no kernels: leave it out there"
            )
    attention = engine.sglang.get("attention_backend")
    if attention not in (None, *_ATTENTION_ON_CPU):
        raise ConfigError(
            f"rollout.engine.sglang.attention_backend is {attention!r}, whose kernels need a GPU: leave it out on a CPU"
        )
