"""Plants each defect and prints whether its test saw it, and by what.

    python tests/planted/score.py                       all, two at once
    python tests/planted/score.py --jobs 14             fourteen at once, each on its share of the cores
    python tests/planted/score.py --only advantage      those whose names contain a text
    python tests/planted/score.py --save FILE           and keep what was raised, a JSON line for each
    python tests/planted/score.py --saved FILE          run nothing, judge what was kept

A defect is seen if its test passes without it and, with it, fails by an assertion or an error of the project: an import
that fails, a time limit, a fixture that breaks or a test that is not collected is no sight.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path

from defects import DEFECTS
from planting import PROJECT, Attempt, Defect, attempt, run_without, verdict_on

sys.path.insert(0, str(PROJECT / "benchmarks"))
from shared_cores import Workers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="defects at once, on cores of their own")
    parser.add_argument("--only", default="", metavar="TEXT", help="only defects whose names contain it")
    parser.add_argument("--save", type=Path, metavar="FILE", help="append what was raised, a JSON line for each")
    parser.add_argument("--saved", type=Path, metavar="FILE", help="run nothing, judge what was kept")
    options = parser.parse_args()
    chosen = {defect.name: defect for defect in DEFECTS if options.only in defect.name}
    seen = 0
    for tried in saved(options.saved) if options.saved else attempts(list(chosen.values()), options.jobs):
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(asdict(tried)) + "\n")
        verdict = verdict_on(tried, chosen[tried.defect].error)
        seen += verdict.seen
        word = "seen" if verdict.seen else "NOT SEEN"
        print(f"{word:9}{tried.defect} ({tried.seconds:.0f} s)\n         {verdict.reason}", flush=True)
    print(f"planted defects: {seen} of {len(chosen)} seen")
    sys.exit(0 if seen == len(chosen) else 1)


def attempts(chosen: Collection[Defect], jobs: int) -> Iterator[Attempt]:
    """In the order in which they end. Each test runs once without a defect."""
    with Workers(jobs) as workers:
        tests = dict.fromkeys((one.test, one.only) for one in chosen)
        without = {test: workers.submit(run_without, *test) for test in tests}
        waiting = [workers.submit(attempt, one, without[one.test, one.only].result().failed_by) for one in chosen]
        for done in as_completed(waiting):
            yield done.result()


def saved(file: Path) -> list[Attempt]:
    return [Attempt(**json.loads(line)) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
