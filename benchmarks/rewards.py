"""How many responses are graded per second, by grader, in one process and in the pool.

    python benchmarks/rewards.py [--responses 4096] [--workers 2]

Responses have about 8,000 tokens (30,000 characters) of mathematics. Half of the answers are right, and one in eight
needs sympy, because neither its text nor its number settles it.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # instead of this folder, where this file hides the package

import rewards  # noqa: E402
from rewards.grading_pool import GradingPool  # noqa: E402

_CHARACTERS = 30_000
_STEPS = (
    r"We have $\frac{a}{b} + \frac{c}{d} = \frac{ad + bc}{bd}$, so the sum is 1,234 in total. ",
    r"Let me check: \[ \int_0^1 x^{2} \, dx = \frac{1}{3} \] and therefore the area is 0.333 of the square. ",
    r"Suppose that \{x, y\} are the roots; their product is $xy = \frac{c}{a}$, which is 12. ",
    r"Then she has 48 - 12 = 36 apples, and half of them are 18. ",
)
_PAIRS = (
    ("42", "42"),
    ("41", "42"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{3}", "0.5"),
    ("1,234", "1234"),
    (r"\text{even}", "odd"),
    (r"(x+1)(x-1)", "x^2-1"),
    ("7", "8"),
)


@dataclass(frozen=True)
class Case:
    """A grader and how responses for it end."""

    ending: Callable[[str], str]
    label: Callable[[str], str] = str
    options: Mapping[str, object] = field(default_factory=dict)
    share: float = 1.0


_CODE = "```python\nprint({!r})\n```"
_CASES = {
    "math": Case(r"The answer is $\boxed{{{}}}$.".format),
    "deepscaler": Case(r"</think> So \boxed{{{}}}".format),
    "dapo": Case("\nAnswer: {}".format),
    "gsm8k": Case("\n#### {}".format),
    "multiple_choice": Case(lambda answer: "\nAnswer: B", lambda label: "B"),
    "f1": Case(str),
    "ifeval": Case(str, lambda label: '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'),
    "length": Case(str, options={"maximum_tokens": 8192, "buffer_tokens": 1024, "response_tokens": 8000}),
    "repetition": Case(str),
    "code": Case(_CODE.format, lambda label: json.dumps({"inputs": [""], "outputs": [label]}), {}, 1 / 64),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{arguments.responses} responses of {_CHARACTERS:,} characters, {arguments.workers} workers")
    print(f"{'grader':<16}{'one core':>14}{'pool':>14}{'pool, per core':>16}{'all in the pool':>18}")
    with GradingPool(arguments.workers, timeout_seconds=30.0) as pool:
        pool.submit("warm-up", "math", r"\boxed{x+1}", "1+x").result()
        for name, case in _CASES.items():
            requests = _requests(case, max(8, int(arguments.responses * case.share)))
            alone = len(requests) / _seconds(
                lambda name=name, case=case, requests=requests: _alone(name, case, requests)
            )
            pooled = _seconds(lambda name=name, case=case, requests=requests: _pooled(pool, name, case, requests))
            rate = len(requests) / pooled
            print(
                f"{name:<16}{alone:>12,.0f}/s{rate:>12,.0f}/s{rate / arguments.workers:>14,.0f}/s"
                f"{arguments.responses / rate:>17.1f}s"
            )
        failures = pool.take_failures()
        print(f"time-outs {len(failures.timeouts)}, errors {len(failures.errors)}")


def _requests(case: Case, count: int) -> list[tuple[str, str]]:
    generator = random.Random(0)
    body = "".join(generator.choice(_STEPS) for _ in range(_CHARACTERS // len(_STEPS[0])))
    pairs = (generator.choice(_PAIRS) for _ in range(count))
    return [
        (f"{number} {body}{case.ending(answer)}", case.label(label)) for number, (answer, label) in enumerate(pairs)
    ]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _alone(name: str, case: Case, requests: list[tuple[str, str]]) -> None:
    for response, label in requests:
        rewards.grade(name, response, label, **case.options)


def _pooled(pool: GradingPool, name: str, case: Case, requests: list[tuple[str, str]]) -> None:
    futures = [
        pool.submit(str(number), name, response, label, case.options)
        for number, (response, label) in enumerate(requests)
    ]
    for future in futures:
        future.result()


if __name__ == "__main__":
    main()
