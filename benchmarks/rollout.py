"""Pool against raw SGLang: the same prompts on the same kind of engine, in turns, both figures printed.

    python benchmarks/rollout.py [--prompts 64] [--tokens 64] [--rounds 5]

Raw means `sglang.Engine.generate` with one list of prompts inside the engine's process, without seeds, padding, Ray
between requests, or streaming. Both engines live side by side and work one after the other.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "rollout"))

import psutil
import ray
from rollout_models import save_dense
from rollout_requests import make_requests

from rlpipe.config.root import Config
from rollout.environment import engine_environment
from rollout.litter import remove_opened_files
from rollout.pool import RolloutPool


class RawEngine:
    """SGLang's own Engine with the flags that a CPU needs, and nothing of rollout/ but the stand-ins."""

    def __init__(self, folder: str, running_requests: int) -> None:
        from sglang import Engine

        self._engine = Engine(
            model_path=folder,
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            dtype="float32",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            max_total_tokens=running_requests * 256,
            max_running_requests=running_requests,
            mem_fraction_static=0.2,
            skip_server_warmup=True,
            skip_tokenizer_init=True,
        )

    def pid(self) -> int:
        return os.getpid()

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        """Number of response tokens."""
        parameters = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
        answers = self._engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=True)
        return sum(len(answer["output_ids"]) for answer in answers)

    def stop(self) -> None:
        remove_opened_files(self._engine.port_args.instance_id)
        self._engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_dense(Path(scratch), seed=0)
        _compare(folder, options)
    ray.shutdown()


@dataclass(frozen=True)
class Measurement:
    """One round of one contender. CPU seconds are those of all its processes: on a busy machine they say more."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float


def _compare(folder: str, options: argparse.Namespace) -> None:
    requests = make_requests(options.prompts, options.tokens)
    prompts = [list(request.prompt_ids) for request in requests]
    environment = engine_environment("cpu", 1, Path(folder), os.environ)
    raw = ray.remote(RawEngine).options(num_cpus=0, runtime_env={"env_vars": environment})
    with RolloutPool.start(_config(options), folder) as pool:
        engine = raw.remote(folder, options.prompts)
        pool.wait_until_ready()
        raw_pid = ray.get(engine.pid.remote())
        contenders = {
            "raw SGLang": ([raw_pid], lambda: ray.get(engine.generate.remote(prompts, options.tokens))),
            "RolloutPool": ([os.getpid(), *pool.worker_pids()], lambda: _pool_tokens(pool, requests)),
        }
        rounds: dict[str, list[Measurement]] = {name: [] for name in contenders}
        for turn in range(options.rounds + 1):
            for name, (pids, generate) in contenders.items():
                measured = _measure(pids, generate)
                if turn:  # the first turn warms both up
                    rounds[name].append(measured)
        ray.get(engine.stop.remote())
    _report(rounds)


def _pool_tokens(pool: RolloutPool, requests: list) -> int:
    return sum(len(one.token_ids) for one in pool.generate(requests, deadline_seconds=600))


def _measure(pids: list[int], generate: Callable[[], int]) -> Measurement:
    cpu, begin = _cpu_seconds(pids), time.perf_counter()
    tokens = generate()
    return Measurement(tokens, time.perf_counter() - begin, _cpu_seconds(pids) - cpu)


def _cpu_seconds(pids: list[int]) -> float:
    """Of these processes; of an engine's also its children's, of this process only its own."""
    processes = [psutil.Process(pid) for pid in pids]
    engines = [process for process in processes if process.pid != os.getpid()]
    processes += [child for engine in engines for child in engine.children(recursive=True)]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def _report(rounds: dict[str, list[Measurement]]) -> None:
    print(f"{'':14}{'tokens per second':>30}{'tokens per CPU second':>30}")
    best = {}
    for name, measured in rounds.items():
        wall = [one.tokens / one.wall_seconds for one in measured]
        cpu = [one.tokens / one.cpu_seconds for one in measured]
        best[name] = (statistics.median(wall), statistics.median(cpu))
        print(f"{name:14}{_spread(wall):>30}{_spread(cpu):>30}")
    ratios = [pool / raw for pool, raw in zip(best["RolloutPool"], best["raw SGLang"], strict=True)]
    print(f"{'pool / raw':14}{ratios[0]:>30.1%}{ratios[1]:>30.1%}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def _config(options: argparse.Namespace) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "iterations": 1},
            "model": {"path": "unused"},
            "data": {"train": [{"name": "none", "path": "unused"}], "max_prompt_tokens": 64},
            "actor": {"max_tokens_per_gpu": 64 + options.tokens},
            "rollout": {
                "max_response_tokens": options.tokens,
                "engine": {"dtype": "float32", "max_running_requests": options.prompts},
            },
        }
    )


if __name__ == "__main__":
    main()
