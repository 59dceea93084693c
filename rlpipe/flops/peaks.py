"""Peak dense bf16 TFLOP/s of accelerators, matched by the exact words of the device's name.

A substring match is how an L20Z becomes an L20 and a GB300 infinite; a default device is how an unknown card gets an
invented MFU. Here a name that is not understood has no peak, and so no MFU.
"""

import logging
import re
from functools import cache

_log = logging.getLogger(__name__)

# Vendors' figures without sparsity, as at least two open training systems cite them.
_PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100": 989.5,
    "H800": 989.5,
    "H200": 989.5,
    "H20": 148.0,
    "L20": 119.5,
    "L40S": 362.05,
    "4090": 165.2,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    "MI300X": 1307.4,
    "MI325X": 1307.4,
}

# Slower forms of a chip that is sold under the same name. None: the form exists but its peak is not established here.
_VARIANT_TFLOPS: dict[tuple[str, str], float | None] = {
    ("H100", "PCIE"): 756.0,
    ("H100", "NVL"): 835.0,
    ("H800", "PCIE"): None,
    ("H200", "NVL"): None,
}


def peak_bf16_tflops(device_name: str, override: float | None = None) -> float | None:
    """Peak of the device that torch calls `device_name`, in dense bf16 TFLOP/s; `override` where it is given.

    None for a device that is not in the table, including a MIG slice, which has only a part of its chip: one warning
    for each name, and no MFU.
    """
    if override is not None:
        return override
    return _table_peak(device_name)


@cache
def _table_peak(device_name: str) -> float | None:
    words = re.split(r"[\s\-_/]+", device_name.upper())
    chips = [word for word in words if word in _PEAK_TFLOPS]
    peak = None
    if len(chips) == 1 and "MIG" not in words:
        variants = [_VARIANT_TFLOPS[chips[0], word] for word in words if (chips[0], word) in _VARIANT_TFLOPS]
        peak = variants[0] if variants else _PEAK_TFLOPS[chips[0]]
    if peak is None:
        _log.warning("the peak of %r is unknown: no MFU; set peak_tflops to the dense bf16 TFLOP/s of it", device_name)
    return peak
