"""Processes of a benchmark that have a GPU each, as Ray's have."""

import os
from multiprocessing.process import BaseProcess


def start_with_gpu(process: BaseProcess, rank: int) -> None:
    """Start a process that sees one GPU: of those that are visible here, or of all of the machine; means nothing where
    there are none. It has to be told before it imports anything, since some libraries ask for GPUs as they are
    imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = str(rank) if visible is None else ",".join(visible.split(",")[rank : rank + 1])
    before = dict(os.environ)
    os.environ |= {"CUDA_VISIBLE_DEVICES": own, "OMP_NUM_THREADS": "1"}
    os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ |= before
