"""`rlpipe sft` by the command line: it learns, and a resumed run gives the bits of one without a break."""

import pytest
from run_support import PROJECT, metric_rows, run_command

_SMALL = [
    "run.name=small",
    "run.iterations=6",
    "prepare.arithmetic.train_problems=256",
    "prepare.arithmetic.test_problems=16",
    "sft.sequences_per_step=32",
    "checkpoint.interval_iterations=3",
]


def _arguments(folder, *more):
    places = [f"run.directory={folder}", f"model.path={folder}/policy", f"prepare.directory={folder}/task"]
    return [str(PROJECT / "configs/demo/sft.yaml"), *_SMALL, *places, *more]


@pytest.mark.slow
def test_sft_learns_and_resumes_to_the_same_bits(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_command("sft", *_arguments(whole))
    run_command("sft", *_arguments(parts, "run.iterations=3"))
    run_command("sft", *_arguments(parts), "--resume")
    rows, resumed = metric_rows(whole / "small"), metric_rows(parts / "small")
    losses = [row["train/loss"] for row in rows]
    assert losses[-1] < 0.8 * losses[0]
    assert losses == [row["train/loss"] for row in resumed]
    weights = "small/policy/model.safetensors"
    assert (whole / weights).read_bytes() == (parts / weights).read_bytes()
    assert all(row["perf/actor_train_tflops_per_gpu"] > 0 for row in rows)
