"""Writes train.jsonl and test.jsonl beside this file: generated rows in the format of GSM8K (`question`, `answer`).

An answer is a solution with calculator annotations, one step a line, and `#### number` at its end; every fifth number
has thousands separators. Run it again after a change: `python tests/gsm8k_rows/make_rows.py`.
"""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
ROWS = {"train": 16, "test": 4}

_NAMES = ("Ada", "Bram", "Chidi", "Dunja", "Emre", "Fumi", "Goran", "Hana")
_THINGS = (("crate", "pears"), ("shelf", "books"), ("bus", "seats"), ("album", "stamps"), ("tray", "seedlings"))


def make_row(generator: random.Random, large: bool) -> dict[str, str]:
    """One word problem of three steps."""
    name, (holder, things) = generator.choice(_NAMES), generator.choice(_THINGS)
    count, each = generator.randint(3, 12), generator.randint(4, 15) * (100 if large else 1)
    total = count * each
    lost = generator.randint(2, count + each)
    kept = total - lost
    added = generator.randint(5, 40)
    question = (
        f"{name} counts {count} places, each a {holder} with {each} {things}. {lost} {things} are given away and then "
        f"{added} new ones arrive. How many {things} does {name} have now?"
    )
    steps = (
        f"At first there are {count}*{each}=<<{count}*{each}={total}>>{total} {things}.",
        f"After the gift {total}-{lost}=<<{total}-{lost}={kept}>>{kept} are left.",
        f"In the end {name} has {kept}+{added}=<<{kept}+{added}={kept + added}>>{kept + added:,} {things}.",
        f"#### {kept + added:,}",
    )
    return {"question": question, "answer": "\n".join(steps)}


def make_rows(split: str) -> str:
    """The content of one file, the same at every call."""
    generator = random.Random(f"gsm8k rows {split}")
    rows = [make_row(generator, large=number % 5 == 0) for number in range(ROWS[split])]
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    for name in ROWS:
        (FOLDER / f"{name}.jsonl").write_text(make_rows(name))
