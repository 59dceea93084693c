"""Run benchmarks and suites of tests, keep what they print with host, versions, commit and the code that cards name.

    python benchmarks/record.py packing "actor_layers --profile" ...     run, keep, and render docs/performance.md
    python benchmarks/record.py gpu_tests                                the same for a suite of tests
    python benchmarks/record.py --limit-seconds 400 long_context         keep what is printed by then, and say so
    python benchmarks/record.py                                          render the page again
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

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
PAGE = PROJECT / "docs" / "performance.md"
CHANGES: dict[str, dict[str, Any]] = yaml.safe_load((PROJECT / "benchmarks" / "changes.yaml").read_text())
PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "trl", "flash-linear-attention")

BENCHMARKS = {
    "whole_step": (
        "Whole iterations at true size",
        "What a user of GPUs asks first: rollout tokens/s are response tokens over the whole phase; actor TFLOP/s "
        "are FLOPs that the model needs over the whole actor phase, optimizer included; exposed optimizer is what of "
        "it no pass hides. The first layers of Qwen3.5-35B-A3B's shape with random weights and a forced response "
        "length, as `rlpipe train` runs them; beside each figure what `rlpipe plan` had said. The first iterations "
        "compile where caches are cold. Optimizer states are 12 bytes a parameter: their upload is hidden under the "
        "passes, and their download is saved where they have room beside the engines.",
    ),
    "whole_step_table": (
        "The guard of collectives in whole iterations",
        "As above on two GPUs with expert and context parallelism and a KL term: what guarding every call costs, and "
        "what the selective policy saves of it.",
    ),
    "whole_step_table_kernels": (
        "The guard of collectives with either kernel of Gated DeltaNet",
        "As above, every guard with FLA's kernels and with FlashQLA's.",
    ),
    "whole_step_table_flashqla": (
        "The guard of collectives with FlashQLA's kernels",
        "As above, with FlashQLA's alone.",
    ),
    "whole_step_flashqla": (
        "FLA's and FlashQLA's kernels in whole iterations",
        "Of Gated DeltaNet, one run of each.",
    ),
    "whole_step_lora": (
        "Adapters beside full training",
        "As above with 8 layers, first all weights trained, then adapters of rank 32 whose optimizer stays on the GPU.",
    ),
    "whole_step_8b": (
        "Qwen3-8B at its true size",
        "As above, all layers: adapters of rank 32 on one GPU, all weights on two.",
    ),
    "long_context": (
        "Long contexts",
        "Supervised steps over one sequence. TFLOP/s and MFU count the causal half of attention, so that they may be "
        "set beside those of short sequences.",
    ),
    "long_context_64k": (
        "Contexts of 65,536 tokens",
        "As above, with half of the tokens, which need no recomputation.",
    ),
    "long_context_256k": (
        "Contexts of 262,144 tokens",
        "As above on two GPUs that share the sequence and the experts.",
    ),
    "rollout": (
        "The pool beside raw SGLang",
        "The floor is raw SGLang with one list of prompts; the pool adds Ray, seeds, streaming and row padding, and "
        "on a CPU its own attention, which is why it is faster there.",
    ),
    "rollout_hybrid": (
        "Decoding of a hybrid policy",
        "As above, with the first layers of Qwen3.5-35B-A3B's shape, and where a decoding step's time goes on the GPU. "
        "The pool is to reach 97 % of raw SGLang.",
    ),
    "rollout_groups": (
        "The pool beside raw SGLang, with groups and a whole vocabulary",
        "As above with the shape of Qwen3-1.7B and 16 samples of each prompt, which the pool computes once.",
    ),
    "rollout_ablation": (
        "What the pool adds to raw SGLang with a hybrid policy",
        "The fastest rounds count, for what else a machine does only ever slows them. The pool is to reach 97 % of raw "
        "SGLang. The looks tell whether a scheduler waits for the GPU or the GPU for it.",
    ),
    "rollout_fp8": (
        "Rollouts in 8 bits",
        "Engines of the same policy in turns: bfloat16, and what `rollout.engine.quantization` and `kv_cache_dtype` "
        "make of it; the shape is that of the first layers of Qwen3.5-35B-A3B. At 128 requests `fp8` is to reach 1.25.",
    ),
    "rollout_drafts": (
        "Drafts",
        "As above with drafts by the model's own prediction layer. The next token is known about half of the time. "
        "With few requests many experts are read for drafted tokens alone.",
    ),
    "draft_learning": (
        "Drafts of a policy that was trained with its prediction layer",
        "A hybrid policy of 40 layers learns, and engines with and without drafts answer what was held out. At 16 "
        "requests drafts are to give 1.5 times the tokens a second, and `auto` is to be slower nowhere.",
    ),
    "tune_moe_fp8": (
        "Block sizes of the experts' kernel in 8 bits",
        "As below, by blocks of 128 x 128 weights; with the kernels that quantise what comes in.",
    ),
    "tune_moe": (
        "Block sizes of the experts' kernel",
        "What `rollout/moe_kernel_blocks` holds for this card, beside SGLang's choice without a file, and the floor: "
        "every touched expert read once, or the card's speed.",
    ),
    "prefix_routing": (
        "Conversations that find their cache",
        "Several engines with `rollout.request_routing: prefix` are to have at least 90 % of the hits of one engine; "
        "without it turns go where the load is least.",
    ),
    "newcomer": (
        "From a name on the hub to a served model",
        "What a newcomer waits for, command by command; SGLang's server and transformers have to agree on what comes "
        "out. On a GPU the model has the shape of Qwen3-0.6B.",
    ),
    "start_and_compile": (
        "Start, cold and warm",
        "Of a colocated run of 4 layers of Qwen3.5-35B-A3B's shape, with empty caches and again with full ones. A "
        "cold start is to reach its first token within 180 s, a warm one within 45 s beside Ray's start; lengths are "
        "random, and nothing is to be compiled from iteration 1 on. Handing the GPU over is to take half a second at "
        "most.",
    ),
    "weight_sync": (
        "Weight updates",
        "The floor is the time of copying the same bytes once over the same link; plain SGLang, where it runs, is the "
        "baseline.",
    ),
    "weight_senders": (
        "Weight updates from several processes",
        "Every process sends what it holds, beside one that sends everything after it was gathered there; both ways in "
        "one run.",
    ),
    "actor_layers": (
        "The actor's layers",
        "The floor is the time of the model FLOPs at the speed of a large matrix product on the same device; the rest "
        "of a pass is memory traffic between products, launches and kernels below that speed.",
    ),
    "actor_layers_flashqla": (
        "The actor's layers with FlashQLA's kernels",
        "As above, with the other kernels of Gated DeltaNet (`actor.gdn_backend: flashqla`).",
    ),
    "attention": (
        "Attention",
        "The packs that the actor meets are of many lengths; it gives cuDNN the sequences of at least 3,000 tokens"
        " where heads have a width of 64, 128 or 256.",
    ),
    "learning": (
        "Learning",
        "Accuracy on held-out problems before and after; in bfloat16 the mean gap of |SGLang - Megatron| is to stay "
        "below 0.02 in each iteration.",
    ),
    "lora_learning": (
        "Learning with adapters",
        "Both go on from the same policy of each seed; adapters are to end where full training does, as far as seeds "
        "tell.",
    ),
    "lora_learning_hybrid": (
        "Learning with adapters, experts included",
        "As above, with Gated DeltaNet and an adapter for each expert.",
    ),
    "fp8_learning": (
        "Learning with rollouts in 8 bits",
        "Both go on from the same policy of each seed; rollouts in 8 bits are to end where those in bfloat16 do, as "
        "far as seeds tell.",
    ),
    "parity": (
        "Parity",
        "Log-probabilities of sampled tokens that have to be the same, and by how many nats they differ at most.",
    ),
    "learning_gates": (
        "Learning gates",
        "Short runs that have to learn as well as they did, and no better (`make gates`).",
    ),
    "demo_whole": (
        "Every demo as it stands",
        "Rewards of the first and the last iteration, held-out accuracy before and after, and the largest gap between "
        "engine and actor of an iteration, in nats a token.",
    ),
    "demo_whole_turns": (
        "Demos of several turns as they stand",
        "As above: two agents, programs that are repaired in the sandbox, a search tool.",
    ),
    "demo_whole_gsm8k": (
        "The demo of GSM8K as it stands",
        "As above: rows that are read, and a policy of random weights, which meets an answer by chance.",
    ),
    "demo_runs": ("Every demo, small", "Two small iterations of each; a demo that fails is told."),
    "driver_scale": (
        "The driver at 4,096 GPUs",
        "A sample is to cost the same up to a million samples, and what GPUs wait for in the driver is to be less than "
        "1 % of a step.",
    ),
    "first_updates": (
        "The first updates after a warm start",
        "Updates of noise alone, where learning rates add up to the same: what falls more owes it to fresh moments "
        "([why](algorithms.md#the-first-updates)).",
    ),
    "packing": (
        "Packing",
        "The floor of packs is real tokens over the budget; a fill of 100 % would meet it.",
    ),
    "comm_guard": (
        "The guard of collectives",
        "Calls that the policy skips may cost 1 % more than without the guard.",
    ),
    "monitoring_overhead": ("What monitoring costs", "At most 0.5 % of a step is allowed."),
    "agents": (
        "Agents",
        "The driver's own time for a turn of an agent is to stay below 1 ms beside the tokenizer's; a thousand "
        "episodes are to run at once in one process.",
    ),
    "agent_learning": (
        "Agents that learn",
        "A game of up to ten turns from random weights, as an environment and through the agents' endpoint. Runs of "
        "one seed are to be equal bit by bit; minutes are those of all iterations on a shared machine.",
    ),
    "rollout_tail": (
        "What the last responses cost",
        "Two engines in each setting, beside what a replay says of it that knows the recorded lengths of the first "
        "setting alone. Partial and dropped responses change which tokens are trained.",
    ),
    "migration_replay": (
        "What moving responses would save on GPUs",
        "No GPU runs here: lengths are drawn, and engines take what `rlpipe plan` says for a step. There are half as "
        "many responses as engines run at a time; what each prompt's get on average is known.",
    ),
    "rewards": ("Grading", "Responses per second and process, for responses of 8,000 tokens."),
    "modes": (
        "Rollout modes",
        "The demo on a CPU, on two GPUs an engine and an actor. Generation and training take about as long as each "
        "other, so in mode `sync` either side is idle half of the time; one iteration ahead, neither should be.",
    ),
    "trl_step": (
        "On a GPU, beside TRL's GRPOTrainer",
        "Whole iterations with the shape of Qwen3-0.6B: same prompts, group size, forced length. TRL generates without "
        "vLLM; its faster way there is `generate`. The aim is three times its speed.",
    ),
    "trl_step_continuous": ("Beside TRL's continuous batching", "As above, with its other way to generate."),
    "cpu_step": (
        "On a CPU, beside TRL's GRPOTrainer",
        "Same policy, prompts, group size, lengths, reward and optimizer, on the cores that both have. TRL generates "
        "with transformers, one padded batch, in the process that trains. Engine, driver and actor of rlpipe are "
        "processes of their own that hand responses and weights to each other, which a policy this small pays for "
        "and a larger one does not notice. The aim is TRL's tokens per second at every size; what keeps short "
        "responses from it is a step of generation, in which attention over a paged cache and SGLang's bookkeeping "
        "cost more than this policy's arithmetic. Figures of a CPU say nothing about a GPU.",
    ),
}
"""Name of the file, title, and what its figures are to be compared with."""


QUESTIONS = {
    "whole_step": "How long is an iteration, where do its seconds go, and was that planned?",
    "rollout": "What does the pool cost beside SGLang alone?",
    "start_and_compile": "How long does a run take to start?",
    "weight_sync": "How long do new weights take?",
    "weight_senders": "What is it worth that every holder of weights sends?",
    "newcomer": "How long is it from a model's name to a served model?",
    "whole_step_lora": "What do adapters save?",
    "long_context": "How long may a sequence be?",
    "long_context_64k": "How much of that needs no recomputation?",
    "actor_layers": "How fast do the layers train, and what is between them and the device's limit?",
    "learning": "Does it learn, and do engine and actor agree?",
    "parity": "Do engine, actor, layouts and data types agree?",
    "learning_gates": "Does every algorithm, mode and layout learn?",
    "driver_scale": "Does one driver suffice for thousands of GPUs?",
    "packing": "How much of a pack is padding?",
    "comm_guard": "What does the guard of collectives cost?",
    "monitoring_overhead": "What does measuring cost?",
    "agents": "What does an agent's turn cost the driver?",
    "agent_learning": "Does an agent at the endpoint learn as an environment does?",
    "rewards": "How many responses can be graded in a second?",
    "trl_step": "How does it compare on a GPU?",
    "cpu_step": "How does it compare on a CPU?",
}
"""What a reader may ask, in the order of the page."""


_OF_TABLE = ("--kl", "--layers", "4", "--response-tokens", "8192")
ARGUMENTS = {
    "rollout_groups": ("rollout", "--model", "Qwen3-1.7B", "--samples", "16"),
    "rollout_hybrid": ("rollout", "--hybrid-layers", "8", "--profile"),
    "rollout_ablation": (
        "rollout",
        "--hybrid-layers",
        "8",
        "--ablate",
        "--brief",
        "--prompts",
        "512",
        "--at",
        "128",
        "512",
    ),
    "rollout_fp8": (
        "rollout",
        "--hybrid-layers",
        "8",
        "--quantization",
        "fp8",
        "fp8+cache",
        "--tokens",
        "1024",
        "--rounds",
        "4",
        "--profile",
    ),
    "rollout_drafts": ("rollout", "--hybrid-layers", "8", "--draft", "mtp", "auto"),
    "tune_moe_fp8": ("tune_moe", "--fp8"),
    "actor_layers_flashqla": ("actor_layers", "--backend", "flashqla"),
    "whole_step_table": ("whole_step", "--table", "--gdn", "fla", *_OF_TABLE),
    "whole_step_table_kernels": ("whole_step", "--table", "--gdn", "fla,flashqla", *_OF_TABLE),
    "whole_step_table_flashqla": ("whole_step", "--table", "--gdn", "flashqla", *_OF_TABLE),
    "whole_step_flashqla": ("whole_step", "--gdn", "fla,flashqla", "--layers", "4", "--response-tokens", "2048"),
    "whole_step_lora": ("whole_step", "--layers", "8", "--lora", "0,32", "--response-tokens", "2048"),
    "whole_step_8b": ("whole_step", "--model", "Qwen3-8B", "--response-tokens", "2048"),
    "long_context_64k": ("long_context", "--tokens", "65536"),
    "long_context_256k": ("long_context", "--tokens", "262144"),
    "trl_step_continuous": ("trl_step", "--paths", "continuous"),
    "demo_whole": ("demo_runs", "--whole"),
    "demo_whole_turns": ("demo_runs", "--whole", "signals", "repair", "search"),
    "demo_whole_gsm8k": ("demo_runs", "--whole", "gsm8k"),
    "lora_learning_hybrid": ("lora_learning", "--demo", "hybrid"),
}
"""Of records that are one more way to run a benchmark: its name, and its arguments."""


SUITES = {
    "default_suite": "bash scripts/test.sh",
    **{f"whole_suite_{part}": f"bash scripts/test.sh --slow --part {part}/6" for part in range(1, 7)},
    "gpu_tests": "python -m pytest tests/gpu",
    "gpu_layouts": "python -m pytest tests/gpu/test_parallel_layouts_gpu.py",
    "jit_hooks": "python -m pytest tests/gpu/test_jit_hooks_gpu.py",
    "gpu_chaos": "python -m pytest -s tests/gpu/test_chaos_gpu.py",
    "gpu_chaos_drafts": "python -m pytest -s tests/gpu/test_chaos_gpu.py -k drafts",
    "planted_defects": "python tests/planted/score.py",
    "chaos": "bash scripts/chaos.sh",
    "slurm_tests": "python -m pytest -v tests/launch/test_slurm.py tests/launch/test_several_hosts.py",
    "image_steps": "bash docker/build_without_registry.sh train configs/demo/arithmetic.yaml run.iterations=2",
}
"""Suites that cards name. Of what they print the end is kept, which holds their summary."""

_SUMMARY = re.compile(r"=+ .*\b(passed|failed|skipped|errors?)\b.* in [\d.]+s")

_LINES_OF_A_SUITE = {"planted_defects": 1000, "slurm_tests": 22, "gpu_chaos_drafts": 9}
"""Of those of which not the last 40 are kept: what each defect was seen by; no head of pytest, which names folders."""

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


def run(name: str, arguments: list[str], limit_seconds: float | None = None) -> Record:
    """Run a benchmark or a suite, and show its lines as they come. Raises CalledProcessError when it fails.

    After `limit_seconds` it is ended as Ctrl-C would end it; the record's last line says so then.
    """
    script, *fixed = ARGUMENTS.get(name, (name,))
    program = [f"benchmarks/{script}.py", *fixed]
    shown = SUITES[name].split() if name in SUITES else ["python", *program]
    started = shown if name in SUITES else [sys.executable, "benchmarks/calibrated.py", *program]
    lines = []
    group = None if limit_seconds is None else 0  # one of its own, which can be interrupted as a whole
    with (
        subprocess.Popen(
            [*started, *arguments], cwd=PROJECT, stdout=subprocess.PIPE, text=True, process_group=group
        ) as benchmark,
        _interrupted_after(limit_seconds, benchmark.pid) as was_cut_off,
    ):
        for line in benchmark.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if was_cut_off.is_set():
        lines.append(f"cut off after {limit_seconds:g} seconds")
    elif benchmark.returncode:
        raise subprocess.CalledProcessError(benchmark.returncode, [*started, *arguments])
    output, calibration = without_calibration("\n".join(lines))
    if name in SUITES:
        output = _end_of_suite(output, _LINES_OF_A_SUITE.get(name, 40))
    date = datetime.now(UTC).date().isoformat()
    command = " ".join([*shown, *arguments])
    record = Record(name, command, date, host(), versions(), output, commit(), calibration_seconds=calibration)
    return with_code_of_cards(record)


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
    """Its model, as the system tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """Of the packages that decide speed; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _questions(results: list[Record]) -> list[tuple[str, str]]:
    there = {result.name for result in results}
    return [(question, BENCHMARKS[name][0]) for name, question in QUESTIONS.items() if name in there]


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
    for name, (title, floor) in BENCHMARKS.items():
        found = [result for result in results if result.name == name]
        if found:
            lines += ["", f"## {title}", "", floor]
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
