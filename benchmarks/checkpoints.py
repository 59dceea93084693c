"""What a checkpoint costs a run at true size, and how the run goes on from it after it was lost or interrupted.

The policy and the iterations are those of whole_step.py, whose options this takes. A checkpoint is saved after the
second iteration; after the third the run is killed (or, with --interrupt, told to end, and saves), and another process
goes on for one iteration.

    python benchmarks/checkpoints.py --layers 8 --response-tokens 2048
    python benchmarks/checkpoints.py --layers 4 --response-tokens 2048 --interrupt      needs room for two checkpoints
    python benchmarks/checkpoints.py --tiny --vocabulary 320 --response-tokens 16 --prompts 2 --samples 2     a CPU
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from random_policy import save_random_policy
from whole_step import arguments, work_folder
from whole_step_setup import PROJECT, Case, Setup

from rlpipe.estimate.run_estimate import Plan
from rlpipe.shared.checkpoint_folder import latest_checkpoint
from rlpipe.shared.host_memory import used_bytes

_SAVED_AFTER, _ENDED_AFTER = 2, 3
_SAVING_SECONDS = 300.0
_POLL_SECONDS = 0.1
_LOG_LINES = 30


@dataclass
class Watch:
    """What is seen of a run while it works: host memory in use by iteration, when each row and the checkpoint came."""

    folder: Path
    begun: float = field(default_factory=time.monotonic)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    row_seconds: dict[int, float] = field(default_factory=dict)
    host_bytes: dict[int, int] = field(default_factory=dict)
    published_seconds: float | None = None

    def look(self) -> None:
        metrics = self.folder / "metrics.jsonl"
        for line in metrics.read_text().splitlines() if metrics.exists() else []:
            row = json.loads(line)
            if int(row["iteration"]) not in self.rows:
                self.row_seconds[int(row["iteration"])] = self._now
            self.rows[int(row["iteration"])] = row
        at = max(self.rows, default=0) + 1
        self.host_bytes[at] = max(self.host_bytes.get(at, 0), used_bytes())
        if self.published_seconds is None and latest_checkpoint(self.folder / "checkpoints"):
            self.published_seconds = self._now

    @property
    def _now(self) -> float:
        return time.monotonic() - self.begun


def main() -> None:
    options = arguments("--interrupt")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    options.iterations = _ENDED_AFTER + 2
    options.settings = [
        f"checkpoint.interval_iterations={_SAVED_AFTER}",
        "checkpoint.keep=1",
        f"fault.grace_seconds={_SAVING_SECONDS}",
        *options.settings,
    ]
    with work_folder(options.folder) as folder:
        setup = Setup(options, folder, options.here)
        case = Case(options.response_tokens[0], options.guard[0], options.gdn[0], options.lora[0])
        layers = setup.layers([case])
        policy = save_random_policy(setup.shape(layers), folder / "policy", setup.dtype)
        setup.write_prompts()
        configuration = setup.write_configuration(case, policy)
        planned = setup.plan(configuration)
        print(f"{layers} layers, {planned.model.parameters / 1e9:.2f} B, {'; '.join(planned.notes)}", flush=True)
        run = folder / case.name
        before = used_bytes()
        first = _first_run(configuration, run, options.interrupt)
        print("\n".join(_first_lines(planned, first, run, before)), flush=True)
        print("\n".join(_second_run(configuration, run)), flush=True)


def _first_run(configuration: Path, run: Path, interrupt: bool) -> Watch:
    """Until it was ended, after its third iteration and its checkpoint."""
    watch = Watch(run)
    with _train(configuration, "--overwrite") as process:
        while _ENDED_AFTER not in watch.rows or watch.published_seconds is None:
            if process.poll() is not None:
                sys.exit("\n".join(_log(configuration)))
            watch.look()
            time.sleep(_POLL_SECONDS)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM if interrupt else signal.SIGKILL)
        process.wait()
    way = "told to end" if interrupt else "killed"
    print(
        f"{way} after iteration {_ENDED_AFTER}: exit code {process.returncode} after {time.monotonic() - begin:.1f} s"
    )
    return watch


def _second_run(configuration: Path, run: Path) -> list[str]:
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None
    saved = int(newest.name.removeprefix("iteration_"))
    settings = [f"run.iterations={saved + 1}", "checkpoint.interval_iterations=0"]
    with _train(configuration, "--resume", *settings) as process:
        if process.wait():
            sys.exit("\n".join(_log(configuration)))
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return [
        f"{'resumed after iteration':44}{saved:>10}",
        f"{'start to first token s':44}{row['perf/start_to_first_token_seconds']:>10.1f}",
        f"{'of it loading the checkpoint s':44}{row['start/policy_seconds']:>10.1f}",
        f"{'iteration after it':44}{int(row['iteration']):>10}",
        f"{'its |SGLang - Megatron| mean':44}{row['mismatch/logprob_abs_mean']:>10.4f}",
    ]


@contextmanager
def _train(configuration: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Killed where it still runs at the end."""
    command = [sys.executable, "-m", "rlpipe", "train", str(configuration), *arguments]
    with configuration.with_suffix(".log").open("a") as log:
        process = subprocess.Popen(command, cwd=PROJECT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _log(configuration: Path) -> list[str]:
    return configuration.with_suffix(".log").read_text().splitlines()[-_LOG_LINES:]


def _first_lines(planned: Plan, watch: Watch, run: Path, before: int) -> Sequence[str]:
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is not None and watch.published_seconds is not None
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    numbers = range(1, _ENDED_AFTER + 1)

    def of_each(title: str, values: dict[int, float], form: str = ",.2f") -> str:
        return f"{title:44}" + "".join(f"{values.get(number, 0.0):>10{form}}" for number in numbers)

    def metric(title: str, name: str, form: str = ",.2f") -> str:
        return of_each(title, {number: watch.rows[number].get(name, 0.0) for number in numbers}, form)

    host = {number: (used - before) / 1e9 for number, used in watch.host_bytes.items()}
    published = watch.published_seconds - watch.row_seconds[_SAVED_AFTER]
    return [
        f"{'a checkpoint, GB':44}{size / 1e9:>10,.1f}  planned {planned.checkpoint_bytes / 1e9:,.1f}",
        f"{'whole after iteration 2 had ended, s':44}{published:>10,.1f}  planned {planned.checkpoint_seconds:,.1f}",
        of_each("iteration", {number: float(number) for number in numbers}, ".0f"),
        metric("step s", "time/step_seconds"),
        metric("of it the checkpoint's begin s", "time/checkpoint_seconds"),
        metric("rollout s", "time/rollout_seconds"),
        metric("optimizer s", "time/optimizer_seconds"),
        metric("of it waiting for the checkpoint s", "ranks/checkpoint_wait_seconds"),
        of_each("most of host GB, less before the run", host, ",.1f"),
    ]


if __name__ == "__main__":
    main()
