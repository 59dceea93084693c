"""Processes of a benchmark that have a GPU each, as Ray's have."""

import os


def show_gpu(rank: int) -> None:
    """Let this process see one GPU, before it asks for any: of those that are visible here, or of all of the machine;
    means nothing where there are none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank) if visible is None else ",".join(visible.split(",")[rank : rank + 1])
    os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"}
