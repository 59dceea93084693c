"""Run benchmarks, keep what they print with host and versions, and make docs/performance.md of all that is kept.

    python benchmarks/record.py packing "actor_layers --profile" ...     run these and render the page
    python benchmarks/record.py                                          render the page again

Raw results lie in benchmarks/results/NAME.HOST.json; nothing on the page is typed by hand but what a benchmark is for.
"""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "benchmarks" / "results"
PAGE = PROJECT / "docs" / "performance.md"
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
    "rollout": (
        "The pool beside raw SGLang",
        "The floor is raw SGLang with one list of prompts; the pool adds Ray, seeds, streaming and row padding, and "
        "on a CPU its own attention, which is why it is faster there.",
    ),
    "prefix_routing": (
        "Conversations that find their cache",
        "Several engines with `rollout.request_routing: prefix` are to have at least 90 % of the hits of one engine; "
        "without it turns go where the load is least.",
    ),
    "weight_sync": (
        "Weight updates",
        "The floor is the time of copying the same bytes once over the same link; plain SGLang, where it runs, is the "
        "baseline.",
    ),
    "actor_layers": (
        "The actor's layers",
        "The floor is the time of the model FLOPs at the speed of a large matrix product on the same device; the rest "
        "of a pass is memory traffic between products, launches and kernels below that speed.",
    ),
    "attention": (
        "Attention",
        "The packs that the actor meets are of many lengths; it gives cuDNN the sequences of at least 3,000 tokens.",
    ),
    "learning": (
        "Learning",
        "Accuracy on held-out problems before and after; in bfloat16 the mean gap of |SGLang - Megatron| is to stay "
        "below 0.02 in each iteration.",
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
    "rewards": ("Grading", "Responses per second and process, for responses of 8,000 tokens."),
    "modes": (
        "Rollout modes",
        "The demo three times. Generation and training take about as long as each other, so in mode `sync` either side "
        "is idle half of the time; one iteration ahead, neither should be.",
    ),
    "cpu_step": (
        "On a CPU, beside TRL's GRPOTrainer",
        "Same policy, prompts, group size, lengths, reward and optimizer, on the cores that both have. TRL generates "
        "with transformers, one padded batch, in the process that trains. Engine, driver and actor of rlpipe are "
        "processes of their own that hand responses and weights to each other, which a policy this small pays for "
        "and a larger one does not notice. The aim is TRL's tokens per second here; figures of a CPU say nothing "
        "about a GPU.",
    ),
}
"""Name of the file, title, and what its figures are to be compared with."""


QUESTIONS = {
    "whole_step": "How long is an iteration, where do its seconds go, and was that planned?",
    "rollout": "What does the pool cost beside SGLang alone?",
    "weight_sync": "How long do new weights take?",
    "actor_layers": "How fast do the layers train, and what is between them and the device's limit?",
    "learning": "Does it learn, and do engine and actor agree?",
    "packing": "How much of a pack is padding?",
    "comm_guard": "What does the guard of collectives cost?",
    "monitoring_overhead": "What does measuring cost?",
    "agents": "What does an agent's turn cost the driver?",
    "rewards": "How many responses can be graded in a second?",
    "cpu_step": "How does it compare on a CPU?",
}
"""What a reader may ask, in the order of the page."""


@dataclass(frozen=True)
class Result:
    """What one benchmark printed, and where."""

    name: str
    command: str
    date: str
    host: str
    versions: dict[str, str]
    output: str


def main() -> None:
    commands = [command.split() for command in sys.argv[1:]]
    unknown = sorted({name for name, *_ in commands} - set(BENCHMARKS))
    if unknown:
        sys.exit(f"unknown benchmarks {', '.join(unknown)}: use {', '.join(BENCHMARKS)}")
    for name, *arguments in commands:
        result = run(name, arguments)
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{name}.{device(result.host)}.json"
        file.write_text(json.dumps(asdict(result), indent=1) + "\n")
    PAGE.write_text(page([Result(**json.loads(file.read_text())) for file in sorted(RESULTS.glob("*.json"))]))


def run(name: str, arguments: list[str]) -> Result:
    """Run `benchmarks/NAME.py`, and show its lines as they come. Raises CalledProcessError when it fails."""
    command = [sys.executable, f"benchmarks/{name}.py", *arguments]
    output = ""
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as benchmark:
        for line in benchmark.stdout or ():
            print(line, end="", flush=True)
            output += line
    if benchmark.returncode:
        raise subprocess.CalledProcessError(benchmark.returncode, command)
    date = datetime.now(UTC).date().isoformat()
    return Result(name, " ".join(["python", *command[1:]]), date, host(), versions(), output.strip())


def device(host: str) -> str:
    """Short name of what a host computes on, for the name of a file: cpu, cuda, or cuda2 for two GPUs."""
    found = re.search(r"(\d+) x GPU", host)
    if found is None:
        return "cpu"
    return "cuda" if found[1] == "1" else f"cuda{found[1]}"


def host() -> str:
    """Processor, cores and visible GPUs of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    text = f"{len(os.sched_getaffinity(0))} cores of {model}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *([f"--id={visible}"] if visible else [])]
    try:
        asked = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return text
    gpus = asked.stdout.splitlines() if asked.returncode == 0 else []
    return f"{text}, {len(gpus)} x GPU {gpus[0]}" if gpus else text


def versions() -> dict[str, str]:
    """Of the packages that decide speed; those that are not there are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _questions(results: list[Result]) -> list[tuple[str, str]]:
    there = {result.name for result in results}
    return [(question, BENCHMARKS[name][0]) for name, question in QUESTIONS.items() if name in there]


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def _is_of_a_cpu(result: Result) -> bool:
    return "GPU" not in result.host


def page(results: list[Result]) -> str:
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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
