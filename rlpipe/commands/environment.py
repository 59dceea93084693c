"""Environment of the driver process and of everything it starts, set before heavy imports."""

import gc
import os
import sys

from rlpipe.shared.bytecode import keep_bytecode
from rlpipe.shared.errors import EXIT_CODE

_DEFAULTS = {
    # Telemetry and progress bars of libraries have no place in a run's output.
    "RAY_USAGE_STATS_ENABLED": "0",
    # The workers are the job: by default Ray lets everything else on the machine go first.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "WANDB_SILENT": "true",
}


def make_folder_importable() -> None:
    """Graders and other functions named as `package.module:function` may lie in the folder that a command runs in.

    Last in the search path, here and in all processes to come, so that nothing of theirs is hidden. Ends
    the command where somebody has removed it.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        print("error: the folder that this command runs in was removed; change to another one", file=sys.stderr)
        raise SystemExit(EXIT_CODE) from None
    present = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if folder not in present:
        os.environ["PYTHONPATH"] = os.pathsep.join([*present, folder])
    if folder not in sys.path:
        sys.path.append(folder)


def set_defaults() -> None:
    """Set what the user has not set, and have the garbage collector look less often."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    keep_bytecode()
    # An iteration holds millions of objects that live until it ends; by default the collector would walk through
    # them again and again (benchmarks/driver_scale.py).
    gc.set_threshold(50_000, 20, 100)
