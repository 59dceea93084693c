"""A run's own checks: the model folder, the tokenizer, memory, a checkpoint to resume, and one iteration for real."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlpipe.commands.doctor.check import Check, fail, ok, warn
from rlpipe.config.root import Config
from rlpipe.shared.errors import CheckpointError, RlpipeError

_SECONDS = 1800
_RESPONSE_TOKENS = 16
# Engine and actor compute in another order: 8 bits of mantissa, or 24.
_AGREEMENT_NATS = {"float32": 1e-3, "bfloat16": 0.25}


def check_run(config: Config, path: Path, overrides: Sequence[str], quick: bool) -> Iterator[Check]:
    """`quick` leaves out the iteration, which starts Ray, engines and actor."""
    yield _plan(config)
    yield _checkpoint(config)
    inputs = _inputs(config)
    yield inputs
    if inputs.fix:
        return
    yield _tokenizer(config)
    if not quick:
        yield from _iteration(path, overrides, config)


def _plan(config: Config) -> Check:
    """Host memory of the planner's actor, engines and optimizer against what is free here."""
    import psutil

    from rlpipe.config.cluster import ClusterConfig
    from rlpipe.estimate.run_estimate import plan
    from rlpipe.training.trained_share import planned_model

    name = "memory for the run"
    here = {"kind": "local", "node": {"memory_gigabytes": psutil.virtual_memory().total / 1e9}}
    try:
        memory = plan(config, planned_model(config), ClusterConfig.model_validate(here)).memory
    except RlpipeError as error:
        if config.prepare.policy is not None:
            return ok(name, f"{config.model.path} is made at the start, and is small")
        return fail(name, str(error), "set model.path to a model folder")
    needed, free = sum(memory.host.values()), psutil.virtual_memory().available
    found = f"{needed / 1e9:.1f} GB without a GPU, {free / 1e9:.1f} GB free"
    if needed > free:
        return warn(name, found, "see rlpipe plan for the cluster that you will use")
    return ok(name, found)


def _checkpoint(config: Config) -> Check:
    """Whether `--resume` would accept the newest checkpoint: every file in full, with the content that was written."""
    from rlpipe.monitoring.run_directory import RunDirectory
    from rlpipe.shared.checkpoint_folder import damaged_files, latest_checkpoint, read_state

    folder = RunDirectory.of(config).checkpoints
    latest = latest_checkpoint(folder)
    if latest is None:
        return ok("checkpoint", f"none at {folder}; the run starts from model.path")
    fix = "look at the disk that holds it, and remove that folder; --resume takes the one before it"
    try:
        state = read_state(latest)
        damaged = damaged_files(latest, state, state["files"])
    except (OSError, CheckpointError) as error:
        return fail("checkpoint", str(error), fix)
    if damaged:
        return fail("checkpoint", f"{latest}: the content of {', '.join(damaged)} is not what was written", fix)
    size = sum(file["bytes"] for file in state["files"].values())
    return ok("checkpoint", f"{latest.name}: {len(state['files'])} files, {size / 1e9:.2f} GB, all as written")


def _inputs(config: Config) -> Check:
    from rlpipe.generation.inputs import load_inputs
    from rlpipe.training.policy_checks import check_algorithm, check_policy

    try:
        inputs = load_inputs(config)
        check_policy(inputs.config)
        check_algorithm(inputs.config)
    except RlpipeError as error:
        return fail("model, data, graders", str(error), "see docs/troubleshooting.md")
    return ok("model, data, graders", f"{len(inputs.training.prompts)} training prompts")


def _tokenizer(config: Config) -> Check:
    """Both sides work on token ids alone, so the model's end must be the tokenizer's."""
    from rlpipe.data.prompts import load_tokenizer
    from rlpipe.model.hub import model_folder
    from rlpipe.model.model_reader import describe_model, end_tokens

    tokenizer = load_tokenizer(config.model.path)
    folder = model_folder(config.model.path)
    rows, ends = describe_model(folder).vocab_size, end_tokens(folder)
    if tokenizer.eos_token_id not in ends:
        found = f"ends with token {tokenizer.eos_token_id}, the model with {sorted(ends)}"
        return warn("tokenizer", found, "add it to rollout.sampling.stop_token_ids, or responses may not end")
    return ok("tokenizer", f"{len(tokenizer)} tokens in {rows} rows, end of sequence {tokenizer.eos_token_id}")


def _iteration(path: Path, overrides: Sequence[str], config: Config) -> Iterator[Check]:
    """One prompt through engines, graders, actor and weight update, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="rlpipe-doctor-") as folder:
        command = [sys.executable, "-m", "rlpipe", "train", str(path), *overrides, *_small(config, folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            yield fail("one iteration", f"did not end within {_SECONDS} seconds", "run it by hand and see its logs")
            return
        rows = Path(folder) / "doctor" / "metrics.jsonl"
        if done.returncode or not rows.exists():
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            yield fail("one iteration", last.removeprefix("error: "), "see docs/troubleshooting.md")
            return
        row = json.loads(rows.read_text().splitlines()[-1])
    yield ok("one iteration", f"{row['time/step_seconds']:.1f} s; weights received as sent")
    difference = row["mismatch/logprob_abs_max"]
    found = f"engine and actor differ by at most {difference:.1e} nats"
    limit = _AGREEMENT_NATS[config.rollout.engine.dtype]
    if difference > limit:
        yield warn("log-probabilities", found, f"over {limit:g} they do not compute the same model: compare versions")
    else:
        yield ok("log-probabilities", found)


def _small(config: Config, folder: str) -> list[str]:
    return [
        f"run.directory={folder}",
        "run.name=doctor",
        "run.iterations=1",
        "warm_start=null",
        "eval.datasets=[]",
        "rollout.mode=sync",
        f"rollout.prompts_per_iteration={max(1, config.actor.processes)}",
        "rollout.samples_per_prompt=2",
        f"rollout.max_response_tokens={_RESPONSE_TOKENS}",
        "algorithm.updates_per_iteration=1",
        "algorithm.overlong.buffer_tokens=0",
        "weight_sync.verify=true",
        "checkpoint.interval_iterations=0",
        "checkpoint.save_hf=never",
        "trackers.wandb=off",
        "jit.warm_up='off'",
    ]
