"""Runs a script between two calibrations in one process: the processor time of fixed work on this machine now.

    python benchmarks/calibrated.py benchmarks/packing.py [arguments]

The work is what drivers and CPU kernels do: Python's own loop, matrix products, copies beyond the caches.
"""

import re
import runpy
import sys
import time
from pathlib import Path
from statistics import median

_LINE = re.compile(r"\n?^calibration ([0-9.e-]+) s$", re.MULTILINE)
_ROUNDS = 5


def main() -> None:
    script, *arguments = sys.argv[1:]
    before = calibrate()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    print(f"calibration {(before + calibrate()) / 2:.6f} s", flush=True)


def calibrate() -> float:
    """Processor seconds of the fixed work, the median of a few rounds."""
    return median(_round() for _ in range(_ROUNDS))


def _round() -> float:
    import numpy as np

    begin = time.process_time()
    total = 0
    for number in range(400_000):
        total += number % 7
    matrix = np.full((384, 384), 1.0 / 384, dtype=np.float32)
    for _ in range(20):
        matrix = matrix @ matrix
    block = np.zeros(8 * 2**20, dtype=np.uint8)
    for _ in range(4):
        block = block.copy()
    return time.process_time() - begin


def without_calibration(output: str) -> tuple[str, float | None]:
    """What the script itself printed, and the seconds of the calibration where they are told."""
    found = _LINE.search(output)
    return _LINE.sub("", output).strip(), None if found is None else float(found[1])


if __name__ == "__main__":
    main()
