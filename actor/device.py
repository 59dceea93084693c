"""The only place of the training half that knows which device there is."""

import torch


def compute_device() -> torch.device:
    """The GPU of this process, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def collective_backend() -> str:
    """The torch.distributed backend of the device."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def synchronize() -> None:
    """Wait until the device has finished what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_buffer_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised host tensor of the same shape and dtype; page-locked where that speeds up transfers."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=torch.cuda.is_available())
