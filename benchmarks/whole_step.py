"""Whole iterations of `rlpipe train` at true size, beside what `rlpipe plan` says of each part.

The policy has the shape of Qwen3.5-35B-A3B, its first layers only, and random weights; responses have a forced length.

    python benchmarks/whole_step.py                                    one GPU, responses of 2,048 and of 8,192 tokens
    python benchmarks/whole_step.py --layers 8 --lora 0,32 --response-tokens 2048      full training and adapters
    python benchmarks/whole_step.py --model Qwen3-8B --lora 32 --response-tokens 2048
    python benchmarks/whole_step.py --gpus 2 --tensor 2 --sequence --kl
    python benchmarks/whole_step.py --model Qwen3.5-35B-A3B --tensor 2 --sequence --context 2 --expert 4     four GPUs
    python benchmarks/whole_step.py --table --gpus 2 --expert 2        guard x Gated DeltaNet kernel, one row each
    python benchmarks/whole_step.py --tiny --vocabulary 320 --response-tokens 16 --prompts 2 --samples 2      a CPU

What has finished is written to --json FILE after every iteration, so a run that is cut off leaves it.
"""

import argparse
import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from random_policy import save_random_policy
from run_table import Row, cell, derived, run_lines, start_seconds
from whole_step_setup import PROJECT, Case, Setup, planned_figures

from rlpipe.estimate.present_cluster import present_cluster
from rlpipe.shared.host_memory import used_bytes

GUARDS = ("off", "selective", "every_call")
_POLL_SECONDS = 0.5
_END_SECONDS = 40.0
_LOG_LINES = 20

# Of the seed's table: guard and kernel down, these across.
COLUMNS = [
    Row("rollout tok/GPU/s", "perf/rollout_tokens_per_gpu_per_second", form=",.0f"),
    Row("ref log-prob s", "time/ref_logprob_seconds"),
    Row("actor train s", "perf/actor_train_seconds"),
    Row("train s", "perf/train_seconds"),
    Row("tokens/s", "perf/actor_tokens_per_second", form=",.0f"),
    Row("TFLOP/s/GPU", "perf/actor_train_tflops_per_gpu", form=",.1f"),
    Row("weight sync s", "time/weight_sync_seconds"),
    Row("step s", "time/step_seconds"),
    Row("actor's GPU peak GB", "memory/actor_gpu_peak_bytes", scale=1e-9, form=",.1f"),
]


@dataclass
class Run:
    """One command `rlpipe train`: what was planned for it, and its metrics so far.

    caches: whether compilers' caches held anything when it began.
    start_seconds: of each part of the start; engines and the actor's processes spend theirs beside each other.
    """

    case: Case
    layers: int
    parameters: int
    chosen: str
    caches: str
    planned: dict[str, float]
    host_before_bytes: int
    ended: str = "running"
    iterations: list[dict[str, float]] = field(default_factory=list)
    start_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        case = self.case
        return (
            f"{case.response_tokens:,} tokens, {case.trained}, guard {case.guard}, gdn {case.gdn}, "
            f"caches {self.caches}: {self.layers} layers, {self.parameters / 1e9:.2f} B; {self.chosen}; {self.ended}"
        )


class Deadline:
    """When everything has to end: after a limit, or at once when this process is told to."""

    def __init__(self, limit_seconds: float) -> None:
        self._end = time.monotonic() + limit_seconds
        self.reason = "out of time"
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: self._stop(number))

    @property
    def passed(self) -> bool:
        return time.monotonic() > self._end

    def _stop(self, number: int) -> None:
        self._end, self.reason = 0.0, f"stopped by signal {number}"


def main() -> None:
    options = arguments()
    deadline = Deadline(options.limit_seconds)
    runs: list[Run] = []
    with work_folder(options.folder) as folder:
        for run in prepared_runs(options, folder):
            runs.append(run)
            follow(run, folder, deadline, lambda: write(options, runs))
            write(options, runs)
            print("\n".join(run_lines(run.title, run.planned, run.iterations, run.start_seconds)), flush=True)
            if deadline.passed:
                break
    if len(runs) > 1:
        print("\n".join(table_lines(runs)), flush=True)
    if not any(run.iterations for run in runs):
        sys.exit("no iteration was finished; see the lines above")


def arguments(*flags: str) -> argparse.Namespace:
    """flags: further ones of a program that runs the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="", help="a whole model of configs/models, with random weights, in place of those layers")
    add("--layers", default="auto", help="first layers of the shape, or auto: as many as `plan` says fit")
    add("--vocabulary", type=int, default=32_768)
    add("--tiny", action="store_true", help="small widths and float32, for a CPU")
    add("--prompts", type=int, default=16)
    add("--samples", type=int, default=8)
    add("--response-tokens", default="2048,8192", help="forced lengths, one run each")
    add("--iterations", type=int, default=3)
    add("--gpus", type=int, default=0, help="0: all that are visible; on a CPU, processes of the actor")
    add("--tensor", type=int, default=1)
    add("--sequence", action="store_true", help="sequence parallelism")
    add("--context", type=int, default=1)
    add("--expert", type=int, default=1)
    add("--engine-tensor", type=int, default=1, help="GPUs of an engine")
    add("--kl", action="store_true", help="a KL term, and so a reference pass")
    add("--lora", default="0", help="ranks of adapters, one run each; 0 trains the model itself")
    add("--guard", default="off", help=f"guard of collectives, one run each: {', '.join(GUARDS)}")
    add("--gdn", default="", help="kernels of Gated DeltaNet, one run each: fla, flashqla, torch")
    add("--table", action="store_true", help="every guard with every kernel")
    add("--limit-seconds", type=float, default=3600.0, help="all runs together; what has not finished is stopped")
    add("--json", type=Path, default=None)
    add("--folder", type=Path, default=None, help="policy, runs and logs stay there; a temporary one when left out")
    add("settings", nargs="*", metavar="KEY=VALUE", help="further settings of the configuration")
    for flag in flags:
        add(flag, action="store_true")
    options = parser.parse_args()
    options.here = present_cluster()
    on_gpu = options.here.gpus > 0
    options.gpus = options.gpus or max(1, options.here.gpus)
    kernels = options.gdn or (("fla,flashqla" if options.table else "fla") if on_gpu else "torch")
    options.gdn = kernels.split(",")
    options.guard = list(GUARDS) if options.table else options.guard.split(",")
    options.response_tokens = [int(length) for length in options.response_tokens.split(",")]
    options.lora = [int(rank) for rank in options.lora.split(",")]
    if unknown := set(options.guard) - set(GUARDS):
        parser.error(f"--guard {', '.join(sorted(unknown))}: use {', '.join(GUARDS)}")
    if on_gpu and options.gpus > options.here.gpus:
        parser.error(f"--gpus {options.gpus}: there are {options.here.gpus}")
    return options


@contextmanager
def work_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def prepared_runs(options: argparse.Namespace, folder: Path) -> Iterator[Run]:
    """Each with its plan, just before it begins. The policy is made before the first."""
    gpus = min(options.gpus, options.here.gpus)
    cluster = options.here.model_copy(update={"node": options.here.node.model_copy(update={"gpus": gpus})})
    setup = Setup(options, folder, cluster)
    cases = [
        Case(*parts) for parts in itertools.product(options.response_tokens, options.guard, options.gdn, options.lora)
    ]
    layers = setup.layers(cases)
    begin = time.monotonic()
    policy = save_random_policy(setup.shape(layers), folder / "policy", setup.dtype)
    print(f"policy of {layers} layers written in {time.monotonic() - begin:.0f} s", flush=True)
    setup.write_prompts()
    for case in cases:
        estimate = setup.plan(setup.write_configuration(case, policy))
        for problem in estimate.problems:
            print(f"plan: {case.name} does not fit: {problem}", flush=True)
        caches = cache_state(estimate.config.jit.cache_directory)
        chosen = ", ".join(estimate.notes)
        yield Run(case, layers, estimate.model.parameters, chosen, caches, planned_figures(estimate), used_bytes())


def cache_state(directory: str | None) -> str:
    """Whether there is anything of earlier runs; of other shapes or versions, compilers find nothing in it."""
    root = Path(directory or "~/.cache/rlpipe/jit").expanduser()
    return "used before" if root.is_dir() and any(root.iterdir()) else "empty"


def follow(run: Run, folder: Path, deadline: Deadline, on_row: Callable[[], None]) -> None:
    """Run it and take its rows as they are written; at the deadline it is stopped as Ctrl-C would."""
    command = [sys.executable, "-m", "rlpipe", "train", str(folder / f"{run.case.name}.yaml"), "--overwrite"]
    log = folder / f"{run.case.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None and not deadline.passed:
                time.sleep(_POLL_SECONDS)
                if take_rows(run, folder):
                    on_row()
            cut = process.poll() is None
            process.terminate()
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{run.case.name} did not end within {_END_SECONDS:g} seconds and was killed", flush=True)
        finally:
            process.kill()
    take_rows(run, folder)
    if cut:
        run.ended = deadline.reason
    else:
        run.ended = "finished" if process.returncode == 0 else f"failed with exit code {process.returncode}"
    if run.ended != "finished":
        print("\n".join(["", f"last lines of {log}:", *log.read_text().splitlines()[-_LOG_LINES:]]), flush=True)


def take_rows(run: Run, folder: Path) -> bool:
    """Whether there are new ones. Iteration 0 is the evaluation before training, and there is none."""
    metrics = folder / run.case.name / "metrics.jsonl"
    if not metrics.exists():
        return False
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    run.start_seconds = start_seconds(rows)
    before, run.iterations = (
        len(run.iterations),
        [derived(row, run.host_before_bytes) for row in rows if row["iteration"] > 0],
    )
    return len(run.iterations) > before


def write(options: argparse.Namespace, runs: list[Run]) -> None:
    if options.json is None:
        return
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    shown["here"] = options.here.model_dump(mode="json")
    whole: dict[str, Any] = {"options": shown, "runs": [asdict(run) for run in runs]}
    options.json.write_text(json.dumps(whole, indent=1) + "\n")


def table_lines(runs: list[Run]) -> list[str]:
    """One row for each run: means over its iterations after the first, which compiles."""
    titles = "".join(f"{column.title:>21}" for column in COLUMNS)
    lines = ["", f"{'tokens':>8} {'trained':12}{'guard':12}{'gdn':10}" + titles]
    for run in runs:
        later = run.iterations[1:] or run.iterations
        cells = (cell(_mean(later, column.metric), column, 21) for column in COLUMNS)
        case = run.case
        lines.append(f"{case.response_tokens:>8,} {case.trained:12}{case.guard:12}{case.gdn:10}" + "".join(cells))
    return lines


def _mean(rows: list[dict[str, float]], metric: str) -> float | None:
    """None where no row has it: a CPU has no peak of a GPU."""
    values = [row[metric] for row in rows if metric in row]
    return fmean(values) if values else None


if __name__ == "__main__":
    main()
