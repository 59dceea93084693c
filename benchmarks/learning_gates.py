"""Short runs that have to learn as well as they did, and no better: one for each algorithm, mode and layout.

    python benchmarks/learning_gates.py                            every gate with seeds 0, 1 and 2
    python benchmarks/learning_gates.py gspo cp2 --seeds 1         some
    python benchmarks/learning_gates.py --jobs 7                   seven runs at once, each on its share of the cores
    python benchmarks/learning_gates.py --record                   and keep what they did as history
    python benchmarks/learning_gates.py --record --missing         go on where that was cut off
    python benchmarks/learning_gates.py --redrawn --record         after a change that alters what is drawn on purpose
    python benchmarks/learning_gates.py --planted                  with defects that each has to turn its gate red
    python benchmarks/learning_gates.py --summary                  run nothing, print what the history holds

A gate (benchmarks/gates.yaml) is red when a metric is not finite, an update is skipped, engine and actor disagree, when
it leaves its own earlier curve of the same seed on the same kind of machine, which it equals where nothing was changed,
or when its held-out accuracy, its reward or what the reward gained leaves the band that the seeds of the history
(benchmarks/results/gates.jsonl) draw, either side: what is too good has usually seen the answers. A layout's gate has
to follow the curve of the gate that it names, seed by seed.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path

from gate_runs import Task, outcome_of
from gate_verdicts import (
    HISTORY,
    NO_BAND,
    Gate,
    Run,
    earlier_curve,
    likeness,
    read_gates,
    read_history,
    runs_of_reference,
    summary,
    verdicts_on,
)
from record import processor_generation
from shared_cores import Workers
from train_run import PROJECT


def main() -> None:
    gates = read_gates()
    options = _arguments(gates)
    if options.summary:
        print("\n".join(summary(gates, read_history())))
        return
    if unknown := sorted(set(options.gates) - set(gates)):
        sys.exit(f"unknown gates {', '.join(unknown)}: use {', '.join(gates)}")
    print(f"{'gate':14}{'seed':>5}{'accuracy':>10}{'reward':>8}  verdict", flush=True)
    bad = total = 0
    history = read_history()
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: gates[name] for name in options.gates or gates}
        seeds = options.seeds or ([0] if options.planted else [0, 1, 2])
        tasks = planted(chosen, seeds, Path(folder)) if options.planted else tasks_of(chosen, seeds, Path(folder))
        if options.missing:
            tasks = [task for task in tasks if not is_known(task.gate, task.seed)]
        for task, run in runs_of(tasks, gates, options.jobs):
            is_bad = judge(task, run, gates, history, options)
            if task.defect or not options.planted:  # others are there for the curve alone
                bad += is_bad
                total += 1
    if options.planted:
        print(f"planted in gates: {total - bad} of {total} seen")
    sys.exit(f"{bad} of {total} runs are {'not red' if options.planted else 'red'}" if bad else 0)


def judge(
    task: Task, run: Run | Exception, gates: dict[str, Gate], history: list[Run], options: argparse.Namespace
) -> bool:
    """Print the line of a run, and say whether it is not as it should be.

    It becomes part of `history`, so that layouts have a curve to follow on a machine that the file does not know, and
    of the file where that is asked for.
    """
    verdicts, like = [str(run)], ""
    if isinstance(run, Run):
        verdicts = verdicts_on(run, task.gate, gates, history, options.redrawn)
        earlier = earlier_curve(run, task.gate, runs_of_reference(task.gate, gates, history))
        like = likeness(run, task.gate, earlier)
    print(line_of(task, run, verdicts, like), flush=True)
    if isinstance(run, Run) and not task.defect:
        history.append(run)
        if options.record:
            with HISTORY.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
    return not is_seen(run, verdicts) if task.defect else bool(verdicts)


def is_seen(run: Run | Exception, verdicts: Sequence[str]) -> bool:
    """Whether a gate is red for what was learned: a run that fails, or has no band, tells nothing about that."""
    if isinstance(run, Run):
        return any(not verdict.startswith(NO_BAND) for verdict in verdicts)
    return isinstance(run, ArithmeticError)


def _arguments(gates: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gates", nargs="*", metavar="GATE", help=", ".join(gates))
    parser.add_argument("--seeds", type=int, nargs="+", help="0, 1 and 2; of planted defects 0")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once, on cores of their own")
    parser.add_argument("--record", action="store_true", help="append what the runs did to the history")
    parser.add_argument("--redrawn", action="store_true", help="judge by bands alone, not by earlier curves")
    parser.add_argument("--planted", action="store_true", help="run each defect of tests/planted/gate_defects.py")
    parser.add_argument("--summary", action="store_true", help="run nothing, print the bands of the history")
    parser.add_argument("--missing", action="store_true", help="only runs that the history does not have yet")
    return parser.parse_args()


def tasks_of(chosen: Mapping[str, Gate], seeds: Iterable[int], folder: Path) -> list[Task]:
    return [Task(gate, seed, folder / str(seed)) for seed in seeds for gate in chosen.values()]


def planted(chosen: Mapping[str, Gate], seeds: Iterable[int], folder: Path) -> list[Task]:
    """The defects of the chosen gates, each in a run of its own; before them a run without any where the history has
    no curve that they could leave."""
    sys.path.insert(0, str(PROJECT / "tests" / "planted"))
    from gate_defects import GATE_DEFECTS
    from planting import environment_of

    found: list[Task] = []
    for seed in seeds:
        healthy = [gate for gate in chosen.values() if gate.name in dict(GATE_DEFECTS) and not is_known(gate, seed)]
        found += [Task(gate, seed, folder / str(seed)) for gate in healthy]
        for name, defect in GATE_DEFECTS:
            if name in chosen:
                marks = folder / f"marks {len(found)}"
                marks.mkdir()
                variables = environment_of(defect, marks)
                found.append(Task(chosen[name], seed, folder / str(seed), defect.name, variables))
    return found


def runs_of(tasks: Sequence[Task], gates: dict[str, Gate], jobs: int) -> Iterator[tuple[Task, Run | Exception]]:
    """What the tasks did, in the order in which they end, or what was raised instead.

    First come the policies that others begin with, which are made once for each seed; last the runs with a defect.
    """
    first = {}
    for task in tasks:
        if task.gate.start or (task.gate.command == "sft" and not task.defect):
            start = gates[task.gate.start or task.gate.name]
            first[start.name, task.folder] = Task(start, task.seed, task.folder)
    wanted = {(task.gate.name, task.folder) for task in tasks if not task.defect}
    rest = [task for task in tasks if (task.gate.name, task.folder) not in first or task.defect]
    starts = list(first.values())
    with Workers(jobs) as workers:
        for stage in (starts, [task for task in rest if not task.defect], [task for task in rest if task.defect]):
            waiting = {workers.submit(outcome_of, task): task for task in stage}
            for done in as_completed(waiting):
                task, run = waiting[done], done.result()
                if isinstance(run, Exception) or stage is not starts or (task.gate.name, task.folder) in wanted:
                    yield task, run


def line_of(task: Task, run: Run | Exception, verdicts: Sequence[str], like: str) -> str:
    """What is printed of a run. like: said of one that nothing is wrong with."""
    figures = " " * 18
    if isinstance(run, Run):
        figures = f"{run.accuracy:10.1%}" + (f"{run.reward:8.3f}" if run.rewards else " " * 8)
    verdict = "; ".join(verdicts) or like
    if task.defect:
        verdict = f"{'seen' if is_seen(run, verdicts) else 'NOT SEEN'}: {task.defect}: {verdict}"
    return f"{task.gate.name:14}{task.seed:5}{figures}  {verdict}"


def is_known(gate: Gate, seed: int) -> bool:
    """Whether the history has this gate with this seed and these settings, from this kind of machine."""
    wanted = (gate.name, seed, gate.digest(), processor_generation())
    return any((old.gate, old.seed, old.settings, old.machine) == wanted for old in read_history())


if __name__ == "__main__":
    main()
