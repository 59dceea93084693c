"""`rlpipe sft` by the command line: it learns, and a resumed run gives the bits of one without a break."""

import pytest
from run_support import PROJECT, metric_rows, run_command

from rlpipe.shared.policy_facts import PolicyFacts

_SMALL = [
    "run.name=small",
    "run.iterations=6",
    "prepare.arithmetic.train_problems=32",
    "prepare.arithmetic.test_problems=16",
    "sft.sequences_per_step=32",
    "checkpoint.interval_iterations=3",
    "checkpoint.save_hf=best",
    "eval.interval_iterations=1",
    "eval.allow_training_rows=true",
]


def _arguments(folder, *more):
    places = [f"run.directory={folder}", f"model.path={folder}/policy", f"prepare.directory={folder}/task"]
    both = ", ".join(f"{{name: {name}, path: {folder}/task/{name}.jsonl}}" for name in ("train", "test"))
    return [str(PROJECT / "configs/demo/sft.yaml"), *_SMALL, *places, f"eval.datasets=[{both}]", *more]


def test_sft_learns_and_resumes_to_the_same_bits(tmp_path):
    weights = tmp_path / "small/policy/model.safetensors"
    run_command("sft", *_arguments(tmp_path))
    (before, *rows), written = metric_rows(tmp_path / "small"), weights.read_bytes()
    losses = [row["train/loss"] for row in rows]
    assert losses[-1] < 0.8 * losses[0]
    assert all(row["perf/actor_train_tflops_per_gpu"] > 0 for row in rows)
    # A step trains all rows, so its loss is that of the same rows before it.
    trained = [row["eval/train/loss"] for row in (before, *rows)]
    assert trained[:-1] == pytest.approx(losses, rel=1e-5)
    assert trained[-1] < rows[-1]["eval/test/loss"] < before["eval/test/loss"]
    assert all(row["time/eval_seconds"] > 0 for row in rows)
    best = PolicyFacts.read(tmp_path / "small/best_policy")
    assert best.metrics["eval/train/loss"] == min(trained)

    weights.write_bytes(b"")
    run_command("sft", *_arguments(tmp_path), "--resume=3")
    resumed = metric_rows(tmp_path / "small")
    assert [row["train/loss"] for row in resumed[1:]] == losses
    assert [row["eval/test/loss"] for row in resumed] == [row["eval/test/loss"] for row in (before, *rows)]
    assert weights.read_bytes() == written
