"""Environment of the driver process and of everything it starts, set before heavy imports."""

import os

_DEFAULTS = {
    # Telemetry and progress bars of libraries have no place in a run's output.
    "RAY_USAGE_STATS_ENABLED": "0",
    # The workers are the job: by default Ray lets everything else on the machine go first.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "WANDB_SILENT": "true",
}


def set_defaults() -> None:
    """Set what the user has not set."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
