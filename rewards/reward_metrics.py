"""What the grading of an iteration looks like: metrics, and a few graded samples to read."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from rewards.grading_pool import Failures
from rlpipe.shared.sample import Reward, Sample

FORMAT = "format"
"""The component by which a grader tells that the answer stood where its convention wants it."""


def summarize(rewards: Iterable[Reward], failures: Failures) -> dict[str, float]:
    """Failure counts, the share of responses in the demanded format and the mean of every other component."""
    values: dict[str, list[float]] = defaultdict(list)
    for reward in rewards:
        for component, value in reward.components.items():
            values[component].append(value)
    metrics = {
        "reward/timeouts_count": float(len(failures.timeouts)),
        "reward/errors_count": float(len(failures.errors)),
    }
    if FORMAT in values:
        metrics["reward/format_share"] = fmean(values.pop(FORMAT))
    return metrics | {f"reward/{component}_mean": fmean(found) for component, found in values.items()}


def graded_table(samples: Sequence[Sample], rows: int) -> list[dict[str, object]]:
    """`rows` graded samples, spread over `samples`: id, prompt, response, label, score, verdict and why."""
    stride = max(1, len(samples) // rows)
    return [
        {
            "sample_id": sample.sample_id,
            "prompt": sample.prompt.text,
            "response": sample.response_text,
            "label": sample.prompt.label,
            "reward": sample.reward.score,
            "correct": sample.reward.correct,
            "reason": sample.reward.reason,
            **{f"component {name}": value for name, value in sample.reward.components.items()},
        }
        for sample in samples[::stride][:rows]
        if sample.reward is not None
    ]
