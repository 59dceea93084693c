"""Run benchmarks and suites of tests, keep what they print with host, versions, commit and the code that cards name.

    python benchmarks/record.py packing "actor_layers --profile" ...     run, keep, and render docs/performance.md
    python benchmarks/record.py gpu_kernels                              the same for a suite of tests
    python benchmarks/record.py --limit-seconds 400 long_context         keep what is printed by then, and say so
    python benchmarks/record.py                                          render all pages that tell of records again
    python benchmarks/record.py --check [NAME ...]                       run again what such a machine has recorded and
                                                                         compare (benchmarks/compare_records.py)
    python benchmarks/record.py --cards                                  note for cards that are new what their code was
                                                                         when their records were made

Raw results lie in benchmarks/results/NAME.HOST.json; nothing on the page is typed by hand but what a benchmark is for.
A benchmark runs between two calibrations in one process (benchmarks/calibrated.py), so that speeds of one kind of
machine can be compared although others use it too.
"""

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from calibrated import without_calibration
from compare_records import COMPARED, compare

from rlpipe.commands.cards.card_files import read_cards
from rlpipe.commands.cards.code_digest import digest_at, present_digest
from rlpipe.commands.cards.record_file import Record, read_record, write_record
from rlpipe.config.base import Section
from rlpipe.estimate.gpu_generations import has_flash_attention_3

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
PAGE = PROJECT / "docs" / "performance.md"
CHANGES: dict[str, dict[str, Any]] = yaml.safe_load((PROJECT / "benchmarks" / "changes.yaml").read_text())
FLASH_ATTENTION_3 = "flash-attention-3"
PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "trl", "flash-linear-attention")


class Benchmark(Section):
    """What docs/performance.md says of a record, and what makes it."""

    title: str
    about: str
    runs: str = ""
    """Program of benchmarks/ and its arguments, where it is not that of the record's name."""


class Suite(Section):
    """A suite of tests, of which what it prints last is kept: its summary."""

    command: str
    lines: int = 40


class Recorded(Section):
    """benchmarks/recorded.yaml."""

    benchmarks: dict[str, Benchmark]
    questions: dict[str, str]
    suites: dict[str, Suite]


_RECORDED = Recorded.model_validate(yaml.safe_load((PROJECT / "benchmarks" / "recorded.yaml").read_text()))
BENCHMARKS, SUITES = _RECORDED.benchmarks, _RECORDED.suites

_SUMMARY = re.compile(r"=+ .*\b(passed|failed|skipped|errors?)\b.* in [\d.]+s")

_END_SECONDS = 60.0
"""That a benchmark has to end in after it was interrupted."""

_WRITTEN_BY_RECORDS = ("benchmarks/results", "docs/performance.md", "docs/cards.md", "README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks, each with its arguments, and suites")
    parser.add_argument("--limit-seconds", type=float, help="of each; one that takes longer is cut off, and told to be")
    parser.add_argument("--check", action="store_true", help="run again and compare with what is recorded")
    parser.add_argument("--cards", action="store_true", help="note the code of new cards in the records they name")
    options = parser.parse_args()
    commands = [name.split() for name in options.names]
    if unknown := sorted({name for name, *_ in commands} - set(BENCHMARKS) - set(SUITES)):
        sys.exit(f"unknown benchmarks {', '.join(unknown)}: use {', '.join([*BENCHMARKS, *SUITES])}")
    if options.check:
        sys.exit(check({name for name, *_ in commands}))
    for name, *arguments in commands:
        write_record(run(name, arguments, options.limit_seconds), RESULTS)
    if options.cards:
        for file in sorted(RESULTS.glob("*.json")):
            write_record(with_code_of_cards(read_record(file), at_its_commit=True), RESULTS)
    PAGE.write_text(page([read_record(file) for file in sorted(RESULTS.glob("*.json"))]))
    # Cards tell of records too: a suite that looks at pages would fail in the next part.
    subprocess.run([sys.executable, "scripts/generate_docs.py"], cwd=PROJECT, check=True)


def run(name: str, arguments: list[str], limit_seconds: float | None = None) -> Record:
    """Run a benchmark or a suite, and show its lines as they come. Raises CalledProcessError when it fails.

    After `limit_seconds` it is ended as Ctrl-C would end it; the record's last line says so then.
    """
    benchmark = BENCHMARKS.get(name)
    script, *fixed = (benchmark and benchmark.runs or name).split()
    program = [f"benchmarks/{script}.py", *fixed]
    suite = SUITES.get(name)
    shown = suite.command.split() if suite else ["python", *program]
    started = shown if suite else [sys.executable, "benchmarks/calibrated.py", *program]
    lines = []
    group = None if limit_seconds is None else 0  # one of its own, which can be interrupted as a whole
    with (
        subprocess.Popen(
            [*started, *arguments],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
            process_group=group,
            preexec_fn=None if group is None else _heed_interrupts,
        ) as process,
        _interrupted_after(limit_seconds, process.pid) as was_cut_off,
    ):
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if was_cut_off.is_set():
        lines.append(f"cut off after {limit_seconds:g} seconds")
    elif process.returncode:
        raise subprocess.CalledProcessError(process.returncode, [*started, *arguments])
    output, calibration = without_calibration("\n".join(lines))
    if suite:
        output = _end_of_suite(output, suite.lines)
    date = datetime.now(UTC).date().isoformat()
    command = " ".join([*shown, *arguments])
    record = Record(name, command, date, host(), versions(), output, commit(), calibration_seconds=calibration)
    return with_code_of_cards(record)


def _heed_interrupts() -> None:
    """What a shell starts in the background ignores interrupts, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_of_suite(output: str, count: int) -> str:
    """The last `count` lines; of those before them the summaries, where pytest ran more than once."""
    lines = output.splitlines()
    return "\n".join([*filter(_SUMMARY.match, lines[:-count]), *lines[-count:]])


@contextmanager
def _interrupted_after(seconds: float | None, group: int) -> Iterator[threading.Event]:
    """Ends the processes of `group` if the block takes longer, which sets the event."""
    was_cut_off = threading.Event()

    def interrupt() -> None:
        was_cut_off.set()
        os.killpg(group, signal.SIGINT)

    timers = []
    if seconds is not None:
        timers = [
            threading.Timer(seconds, interrupt),
            threading.Timer(seconds + _END_SECONDS, os.killpg, (group, signal.SIGKILL)),
        ]
    for timer in timers:
        timer.start()
    try:
        yield was_cut_off
    except KeyboardInterrupt:
        if seconds is not None:
            os.killpg(group, signal.SIGINT)
        raise
    finally:
        for timer in timers:
            timer.cancel()


def with_code_of_cards(record: Record, at_its_commit: bool = False) -> Record:
    """The record with a digest of the code of each card that names it: as it is here, or, for cards that the record
    does not know yet, as it was in its commit."""
    named = {name: card for name, (_, card) in read_cards().items() if record.stem in card.records}
    code = {name: digest for name, digest in record.code.items() if name in named} if at_its_commit else {}
    for name, card in named.items():
        if not code.get(name):
            code[name] = (
                digest_at(PROJECT, record.commit, card.code) if at_its_commit else present_digest(PROJECT, card.code)
            )
    return replace(record, code=code)


def check(names: set[str]) -> int:
    """Run again what a machine of this kind has recorded, and print what has changed. Returns the exit code."""
    here = host()
    failed = 0
    for file in sorted(RESULTS.glob("*.json")):
        old = read_record(file)
        if old.name not in COMPARED or old.host != here or (names and old.name not in names):
            continue
        script, *arguments = old.command.split()[1:]
        for comparison in compare(old, run(Path(script).stem, arguments)):
            print(comparison)
            failed += not comparison.within
    print(f"{failed} figures are out of their limits" if failed else "all figures are within their limits")
    return 1 if failed else 0


def commit() -> str:
    """Of this checkout, with a + where its code is not as it was committed; empty outside of one."""
    git = ["git", "-C", str(PROJECT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    code = [":/", *(f":!/{path}" for path in _WRITTEN_BY_RECORDS)]
    changed = subprocess.run([*git, "status", "--porcelain", "--", *code], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def host() -> str:
    """Processor, cores and visible GPUs of this machine."""
    text = f"{len(os.sched_getaffinity(0))} cores of {processor()}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return text
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *([f"--id={visible}"] if visible else [])]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return text
    gpus = asked.stdout.splitlines() if asked.returncode == 0 else []
    return f"{text}, {len(gpus)} x GPU {gpus[0]}" if gpus else text


def processor() -> str:
    """Its name, as the system tells it."""
    return _of_processor("model name") or platform.machine()


def processor_generation() -> str:
    """Its name with family and model: generations of one name may have other vectors, which round sums otherwise."""
    numbers = [_of_processor("cpu family"), _of_processor("model")]
    return f"{processor()} {'/'.join(numbers)}" if all(numbers) else processor()


def _of_processor(key: str) -> str:
    """What /proc/cpuinfo says of the first processor; empty where it does not."""
    rows = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line]
    return next((value.strip() for name, value in rows if name.strip() == key), "")


def versions() -> dict[str, str]:
    """Of the packages that decide speed; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if has_flash_attention_3():
        found[FLASH_ATTENTION_3] = f"of sglang-kernel {version('sglang-kernel')}"
    return found


def _questions(results: list[Record]) -> list[tuple[str, str]]:
    there = {result.name for result in results}
    return [(question, BENCHMARKS[name].title) for name, question in _RECORDED.questions.items() if name in there]


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _is_of_a_cpu(result: Record) -> bool:
    return "GPU" not in result.host


def page(results: list[Record]) -> str:
    """docs/performance.md."""
    lines = [
        "# Performance",
        "",
        "Made by `python benchmarks/record.py` from what the benchmarks print. Shared machines are noisy: a ratio",
        "within one run says more than a figure by itself. [Is this speed normal?](speed.md) says which figures to",
        "look at in a run of your own.",
        "",
        "| question | section |",
        "|---|---|",
        *(f"| {question} | [{title}](#{_anchor(title)}) |" for question, title in _questions(results)),
    ]
    for name, benchmark in BENCHMARKS.items():
        found = [result for result in results if result.name == name]
        if found:
            lines += ["", f"## {benchmark.title}", "", benchmark.about]
        for result in sorted(found, key=_is_of_a_cpu):
            packages = ", ".join(f"{package} {number}" for package, number in result.versions.items())
            lines += ["", f"`{result.command}`, {result.date}, {result.host}; {packages}."]
            lines += ["", "```text", *result.output.splitlines(), "```"]
        if found and name in CHANGES:
            lines += ["", *_changes(name)]
    return "\n".join(lines) + "\n"


def _changes(name: str) -> list[str]:
    """The table of what was changed after a profile."""
    columns, changes = ("floor", "before", "predicted", "after"), CHANGES[name]["changes"]
    rows = [[row["what"], *("" if row.get(key) is None else str(row[key]) for key in columns)] for row in changes]
    return [
        f"What was changed after a profile, or left: {CHANGES[name]['figures']}.",
        "",
        f"| change | {' | '.join(columns)} |",
        "|---|---:|---:|---:|---:|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    main()
