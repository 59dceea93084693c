"""Generated sums in DAPO-math format: one JSON object a line, `prompt` (chat messages) and `label`.

Each row also has what a supervised warm start can be made from: its `expression`, and a `solution`, which adds digit by
digit from the right: `7+8=15,3+4+1=8 Answer: 85`.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlpipe.config.model import ArithmeticTaskConfig
from rlpipe.shared.atomic_file import write_atomically
from rlpipe.shared.errors import ConfigError

Problem = tuple[int, ...]
Row = Mapping[str, object]


def arithmetic_rows(task: ArithmeticTaskConfig, seed: int) -> tuple[Iterable[Row], Iterable[Row]]:
    """Rows for training and for a test; no problem of the test, in any order of its operands, is in the others."""
    train, test = split_problems(task, seed)
    return map(row, train), map(row, test)


def write_rows(folder: Path, train: Iterable[Row], test: Iterable[Row]) -> None:
    """Write train.jsonl and test.jsonl, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        write_atomically(folder / f"{name}.jsonl", rows_text(rows).encode())


def rows_text(rows: Iterable[Row]) -> str:
    """As the lines of a file."""
    return "".join(json.dumps(one) + "\n" for one in rows)


def split_problems(task: ArithmeticTaskConfig, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Train and test problems, all different; the split is drawn over unordered operands.

    Raises ConfigError when there are fewer problems than asked for.
    """
    generator = random.Random(f"arithmetic {seed}")
    wanted = task.train_problems + task.test_problems
    kinds = _unordered_problems(task, wanted, generator)
    test = [_shuffled(kind, generator) for kind in kinds[: task.test_problems]]
    train = [_shuffled(kind, generator) for kind in kinds[task.test_problems :]]
    return train, test


def row(problem: Problem) -> Row:
    """One line of the data set."""
    expression = "+".join(map(str, problem))
    return {
        "prompt": [{"role": "user", "content": f"{expression}=?"}],
        "label": str(sum(problem)),
        "expression": expression,
        "solution": solution(problem),
    }


def solution(problem: Problem) -> str:
    """Column addition, from the right, then the answer."""
    columns = []
    carry = 0
    for digits in _columns(problem):
        total = sum(digits) + carry
        terms = [*digits, carry] if carry else digits
        columns.append("+".join(map(str, terms)) + f"={total}")
        carry = total // 10
    return ",".join(columns) + f" Answer: {sum(problem)}"


def _columns(problem: Problem) -> Iterator[Sequence[int]]:
    for place in range(len(str(max(problem)))):
        yield [operand // 10**place % 10 for operand in problem]


def _unordered_problems(task: ArithmeticTaskConfig, wanted: int, generator: random.Random) -> list[Problem]:
    highest = 10**task.digits - 1
    available = _count_multisets(highest + 1, task.operands)
    if wanted > available:
        raise ConfigError(
            f"prepare.arithmetic asks for {wanted} problems, but {task.operands} operands of {task.digits} digits give "
            f"only {available}: raise digits or lower train_problems"
        )
    kinds: dict[Problem, None] = {}
    while len(kinds) < wanted:
        kinds[tuple(sorted(generator.randint(0, highest) for _ in range(task.operands)))] = None
    return list(kinds)


def _count_multisets(values: int, size: int) -> int:
    count = 1
    for index in range(size):
        count = count * (values + index) // (index + 1)
    return count


def _shuffled(problem: Problem, generator: random.Random) -> Problem:
    operands = list(problem)
    generator.shuffle(operands)
    return tuple(operands)
