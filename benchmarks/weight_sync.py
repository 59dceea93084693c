"""Seconds of a weight update from the actor to an engine, next to SGLang's own update and to the link.

    python benchmarks/weight_sync.py [--rounds 5] [--tiny]

The policy is a hybrid of 8 layers of the shape of Qwen3.5-35B-A3B (7.75 B parameters, random, bfloat16; tiny on a CPU).
Updates go the way of a training run: colocated, engine and actor on one GPU; separate, on two, where there are two;
both again with an engine whose experts have 8 bits, which the actor makes of them. GB are those that are sent.
Plain SGLang is `update_weights_from_tensor` with one list of the same tensors inside the engine's process. The link is
what copying one large tensor the same way reaches.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ray
import torch
from layer_shapes import hybrid_config
from random_policy import save_random_policy
from raw_engine import runnable_attention
from safetensors.torch import load_file

from rlpipe.config.root import Config
from rlpipe.training.opening import Opening
from rlpipe.training.placement import engine_placement
from rlpipe.training.ray_cluster import ray_cluster
from rlpipe.training.session import open_run, open_session
from rollout.cleanup import remove_opened_files
from rollout.engine_environment import engine_environment

_COPY_BYTES = 2**30


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device. memory: the share of it that an engine may fill, beside the actor."""

    tiny: bool
    dtype: str
    layers: int
    vocabulary: int
    memory: float
    sglang: dict[str, Any]


ON_GPU = Sizes(False, "bfloat16", 8, 248320, 0.5, runnable_attention())
ELSEWHERE = Sizes(True, "float32", 4, 512, 0.2, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="updates that are timed")
    parser.add_argument("--tiny", action="store_true", help="a tiny policy, as on a CPU")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    sizes = ON_GPU if gpus and not options.tiny else ELSEWHERE
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        config = hybrid_config(sizes.layers, sizes.vocabulary, sizes.tiny)
        policy = Path(save_random_policy(config, scratch / "policy", sizes.dtype))
        size = sum(file.stat().st_size for file in policy.glob("*.safetensors"))
        print(f"{size / 1e9:.3f} GB of {sizes.dtype} weights", flush=True)
        separate = _config(sizes, scratch, colocate=False)
        for colocate in (True, False) if gpus > 1 else (True,):
            where = ("one GPU" if colocate else "two GPUs") if gpus else "CPU"
            _report(f"link, {where}", *_copies(separate, min(gpus, 1 if colocate else 2)))
            _report(f"rlpipe, {where}", *_updates(_config(sizes, scratch, colocate), options.rounds))
            if gpus:  # a CPU has no products of 8 bits
                _report(f"rlpipe, {where}, fp8", *_updates(_config(sizes, scratch, colocate, "fp8"), options.rounds))
        if gpus:  # SGLang alone cannot serve a hybrid on a CPU
            _report("plain SGLang", *_plain_updates(separate, options.rounds))


def _report(name: str, size_bytes: float, seconds: list[float]) -> None:
    print(
        f"{name:24}{size_bytes / 1e9:8.3f} GB{median(seconds):9.4f} s ({min(seconds):.4f} to {max(seconds):.4f})"
        f"{size_bytes / median(seconds) / 1e9:10.2f} GB/s",
        flush=True,
    )


def _updates(config: Config, rounds: int) -> tuple[float, list[float]]:
    """Bytes and seconds of whole updates, as the driver waits for them. The session itself makes the first one,
    untimed."""
    size, seconds = 0.0, []
    with redirect_stdout(sys.stderr), open_run(config, Opening(overwrite=True)) as run, open_session(run) as session:
        for version in range(1, rounds + 1):
            begin = time.perf_counter()
            size = session.weights.push(version)["weight_sync/bytes"]
            seconds.append(time.perf_counter() - begin)
    return size, seconds


def _plain_updates(config: Config, rounds: int) -> tuple[float, list[float]]:
    """Bytes and seconds of SGLang's own update of one engine, after a first one."""
    with ray_cluster(config), engine_placement(config) as place:
        engine = ray.remote(PlainEngine).options(
            num_cpus=0,
            num_gpus=place.gpus_per_bundle,
            scheduling_strategy=place.strategy(0),
            runtime_env={"env_vars": engine_environment("cuda", 1, Path(config.model.path), os.environ)},
        )
        handle: Any = engine.remote(config)
        updates = ray.get([handle.update.remote() for _ in range(rounds + 1)])
        ray.get(handle.stop.remote())
    return updates[0][0], [seconds for _, seconds in updates[1:]]


class PlainEngine:
    """SGLang's own Engine, and all its weights once more in the same process."""

    def __init__(self, config: Config) -> None:
        from sglang import Engine

        engine, folder = config.rollout.engine, Path(config.model.path)
        self._engine = Engine(
            model_path=str(folder),
            dtype=engine.dtype,
            grammar_backend="none",
            max_total_tokens=engine.kv_cache_tokens,
            max_running_requests=engine.max_running_requests,
            mem_fraction_static=engine.memory_share,
            disable_cuda_graph=True,
            skip_server_warmup=True,
            skip_tokenizer_init=True,
            log_level="warning",
            **engine.sglang,
        )
        self._tensors = [
            pair for file in sorted(folder.glob("*.safetensors")) for pair in load_file(file, "cuda").items()
        ]

    def update(self) -> tuple[float, float]:
        """Bytes and seconds of one update."""
        begin = time.perf_counter()
        done, message = self._engine.update_weights_from_tensor(self._tensors)
        if not done:
            raise RuntimeError(message)
        seconds = time.perf_counter() - begin
        return sum(tensor.nbytes for _, tensor in self._tensors), seconds

    def stop(self) -> None:
        self._tensors = []
        remove_opened_files(self._engine.port_args.instance_id)
        self._engine.shutdown()


def _copies(config: Config, gpus: int) -> tuple[float, list[float]]:
    """Bytes and seconds of copying one tensor on a GPU, or from one to another, or in host memory where there is
    none."""
    with ray_cluster(config):
        return _COPY_BYTES, ray.get(ray.remote(num_cpus=1, num_gpus=gpus)(_copy_seconds).remote(gpus))


def _copy_seconds(gpus: int) -> list[float]:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda:0" if gpus else "cpu")
    target = torch.empty_like(source, device=f"cuda:{gpus - 1}" if gpus else "cpu")
    found = []
    for _ in range(6):
        begin = time.perf_counter()
        target.copy_(source)
        for gpu in range(gpus):
            torch.cuda.synchronize(gpu)
        found.append(time.perf_counter() - begin)
    return found[1:]


def _config(sizes: Sizes, scratch: Path, colocate: bool, quantization: str = "none") -> Config:
    return Config.model_validate(
        {
            "run": {"name": "weight-sync", "iterations": 1, "directory": str(scratch / "runs")},
            "model": {"path": str(scratch / "policy")},
            "prepare": {"arithmetic": {"train_problems": 8, "test_problems": 1}, "directory": str(scratch / "task")},
            "data": {"train": [{"name": "sums", "path": str(scratch / "task" / "train.jsonl")}]},
            "reward": {"name": "math"},
            "checkpoint": {"interval_iterations": 0, "save_hf": "never"},
            "jit": {"warm_up": "off"},
            "ray": {"colocate": colocate, "sleep": "never"},  # the update alone, not what changing turns costs
            "actor": {
                "dtype": sizes.dtype,
                # Only the last norm is trained: optimizer states of all would fill the host's memory for nothing.
                "frozen_parameters": [r"^(?!model\.norm\.)"],
            },
            "rollout": {
                "prompts_per_iteration": 1,
                "samples_per_prompt": 2,
                "max_response_tokens": 16,
                "engine": {
                    "dtype": sizes.dtype,
                    "quantization": quantization,
                    "max_running_requests": 8,
                    "kv_cache_tokens": 8192,
                    "memory_fraction": sizes.memory,
                    "deterministic": sizes.tiny,
                    "sglang": sizes.sglang,
                },
            },
        }
    )


if __name__ == "__main__":
    main()
