"""What waiting for the last responses costs two real engines, in each setting, beside what a replay says of it that
knows the recorded lengths of the first setting alone.

The demo's policy on a CPU, without training it first. Lengths are drawn from a lognormal distribution over prompts and
around each, and every response is written to its length. Prompts recur, as in later epochs. A machine that is shared
is not as fast in one run as in the next, so seconds are also given at the pace of the first setting's engines.

    python benchmarks/rollout_tail.py [key=value ...]      overrides of the run's settings
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean

# Before this folder, whose files hide packages.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_run import train

from rlpipe.monitoring.report.tail_replay import Setting, replay
from rlpipe.monitoring.response_record import ResponseRecord, read_record

SETTINGS = [
    "rollout.engines=2",
    "rollout.prompts_per_iteration=12",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_tokens=512",
    "rollout.engine.max_running_requests=8",
    "rollout.engine.deterministic=false",
    "rollout.sampling.ignore_eos=true",
    "rollout.generate.function=tests.rlpipe.long_tail:write_drawn_length",
    "rollout.max_staleness=2",
    "algorithm.old_policy=rollout",
    "prepare.arithmetic.train_problems=36",
    "run.iterations=11",
    "warm_start=null",
    "eval.interval_iterations=0",
    "checkpoint.interval_iterations=0",
    "checkpoint.save_hf=never",
    "trackers.wandb=off",
    "trackers.tensorboard=false",
]
COMPARED = {
    "arrival": Setting(longest_first=False),
    "longest_first": Setting(),
    "longest_first, migration": Setting(migration=True),
    "longest_first, oversampling 1.5": Setting(oversampling=1.5),
    "longest_first, oversampling 1.5, partial": Setting(oversampling=1.5, partial=True),
}
FIRST_EPOCH = 3
"""Iterations in which no prompt recurs."""


COLUMNS = ("seconds", "at one pace", "replayed", "room lost", "replayed", "trained tokens", "replayed", "moved")
METRICS = (
    "perf/rollout_seconds",
    "rollout/tail_lost_share",
    "rollout/response_tokens_mean",
    "rollout/responses_moved_count",
)


def main() -> None:
    recorded: list[ResponseRecord] = []
    print(f"{'setting':41}" + "".join(f"{column:>15}" for column in COLUMNS))
    for name, setting in COMPARED.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = train(
                "configs/demo/arithmetic.yaml", Path(folder), "tail", [*_settings(folder, setting), *sys.argv[1:]]
            )
            own = _records(Path(folder) / "tail/responses.jsonl")[FIRST_EPOCH:]
        recorded = recorded or own
        replayed = replay(recorded, setting)
        seconds, lost, tokens, moved = (fmean(row[metric] for row in rows[FIRST_EPOCH + 1 :]) for metric in METRICS)
        at_one_pace = seconds * _full_pace(recorded) / _full_pace(own)
        print(
            f"{name:41}{seconds:15.2f}{at_one_pace:15.2f}{replayed.seconds:15.2f}{lost:15.1%}"
            f"{replayed.lost_share:15.1%}{tokens:15.1f}{replayed.trained_tokens:15.1f}{moved:15.1f}",
            flush=True,
        )


def _full_pace(records: list[ResponseRecord]) -> float:
    """Seconds of a token on an engine that runs as many responses as it may."""
    return fmean(record.pace.seconds(record.shape.running) for record in records)


def _settings(folder: str, setting: Setting) -> list[str]:
    order = "longest_first" if setting.longest_first else "arrival"
    places = [f"prepare.directory={folder}/task", f"model.path={folder}/policy"]
    varied = [f"rollout.oversampling={setting.oversampling}", f"rollout.partial={str(setting.partial).lower()}"]
    varied += [f"rollout.migration={str(setting.migration).lower()}", f"rollout.request_order={order}"]
    return [*SETTINGS, *places, *varied]


def _records(path: Path) -> list[ResponseRecord]:
    records = [read_record(json.loads(line)) for line in path.read_text().splitlines()]
    return [record for record in records if record is not None]


if __name__ == "__main__":
    main()
