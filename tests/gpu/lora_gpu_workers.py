"""A hybrid policy that trains in full and with adapters on one GPU; imports Megatron."""

import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from train_support import make_pack
from train_workers import trainer

from rlpipe.config.algorithm import AlgorithmConfig
from rlpipe.jit_monitor import JitMonitor

STEPS = 8
SUPERVISED = AlgorithmConfig(loss="sft")


def full_and_adapters(rank: int, count: int, path: Path) -> dict[str, dict[str, Any]]:
    """Losses, median seconds of a step and peak bytes of each way, on the same packs."""
    JitMonitor.install()  # with it all cores compile what Triton tunes, as in a run
    pack = make_pack([900, 1500, 700, 996], 0, 4096.0)
    adapters = {"lora": {"rank": 32, "experts": "each"}}
    answers = {}
    for name, options in {"full": {}, "lora": adapters}.items():
        optimizer = {"learning_rate": 1e-2 if options else 1e-3, "cpu_offload_fraction": 0.0}
        policy = trainer(path, dtype="bfloat16", optimizer=optimizer, **options)
        torch.cuda.reset_peak_memory_stats()
        seconds, losses = [], []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            losses.append(policy.train_step([pack], SUPERVISED).metrics["train/loss"])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        answers[name] = {
            "losses": losses,
            "seconds": median(seconds[2:]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
        del policy
        gc.collect()
        torch.cuda.empty_cache()
    return answers
