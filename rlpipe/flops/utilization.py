"""From FLOPs and seconds to the figures that people compare."""


def tflops_per_gpu(flops: int, seconds: float, gpus: int) -> float:
    """Achieved TFLOP/s of each of `gpus` devices that did the work; ValueError unless time and devices are positive.

    Count the devices of the phase only: never rollout devices of a disaggregated job in a training figure.
    """
    if seconds <= 0 or gpus < 1:
        raise ValueError(f"no rate over {seconds} seconds on {gpus} devices")
    return flops / seconds / gpus / 1e12


def utilization(flops: int, seconds: float, gpus: int, peak_tflops: float | None) -> float | None:
    """Share of the peak: MFU for model FLOPs, HFU for hardware FLOPs. None where the peak is unknown."""
    if peak_tflops is None:
        return None
    return tflops_per_gpu(flops, seconds, gpus) / peak_tflops
