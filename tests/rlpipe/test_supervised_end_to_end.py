"""`rlpipe sft` by the command line: it learns, and a resumed run gives the bits of one without a break."""

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


def test_sft_learns_and_resumes_to_the_same_bits(tmp_path):
    weights = tmp_path / "small/policy/model.safetensors"
    run_command("sft", *_arguments(tmp_path))
    rows, written = metric_rows(tmp_path / "small"), weights.read_bytes()
    losses = [row["train/loss"] for row in rows]
    assert losses[-1] < 0.8 * losses[0]
    assert all(row["perf/actor_train_tflops_per_gpu"] > 0 for row in rows)

    weights.write_bytes(b"")
    run_command("sft", *_arguments(tmp_path), "--resume=3")
    assert [row["train/loss"] for row in metric_rows(tmp_path / "small")] == losses
    assert weights.read_bytes() == written
