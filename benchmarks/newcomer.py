"""From a name on the hub to a served model, by the commands of the README: planned, trained, resumed, exported, then
loaded by SGLang's own server and by transformers, which must agree. Prints the seconds of each command.

On a GPU the model has the shape of Qwen3-0.6B and is trained by its recipe; on a CPU it is tiny. Weights are random,
and the hub is a cache that is made here, so nothing is downloaded.

    python benchmarks/newcomer.py [key=value ...]      overrides of the recipe's settings
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # before this folder, where rollout.py hides the package

import torch
from layer_shapes import tiny_model
from random_policy import save_random_policy
from safetensors.torch import load_file
from train_run import PROJECT
from transformers import AutoModelForCausalLM

from rlpipe.estimate.gpu_generations import has_flash_attention_3
from rollout.engine_environment import engine_environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAME = "some-one/Qwen3-0.6B-random"
RECIPE = "qwen3_0_6b_gsm8k"
GAP_LIMIT = 0.05
"""In nats, of greedy tokens' log-probabilities in bfloat16: mean of |SGLang - transformers|."""

SETTINGS = f"""\
base: configs/recipes/{RECIPE}.yaml
run: {{name: mine, iterations: 2}}
model: {{path: {NAME}}}
data:
  train: [{{name: mine, path: rows.jsonl, prompt_column: question, label_column: answer}}]
eval:
  datasets: [{{name: mine_test, path: test.jsonl, prompt_column: question, label_column: answer}}]
  max_response_tokens: 32
rollout: {{max_response_tokens: 256}}
reward: {{name: "my_reward:share_of_digits"}}
actor: {{optimizer: {{learning_rate: 1.0e-4}}}}
checkpoint: {{interval_iterations: 2, keep: 2}}
"""
ON_A_CPU = [
    "rollout.prompts_per_iteration=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=16",
    "rollout.engine.max_running_requests=16",
    "actor.threads=1",
]
REWARD = '''\
def share_of_digits(response: str, label: str) -> float:
    """How much of the response is digits: what random weights write, too, now more and now less."""
    return sum(letter.isdecimal() for letter in response) / max(len(response), 1)
'''


class Way:
    """The newcomer's folder, and what was done there, with its seconds."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
        # Programs of this checkout, and the newcomer's own reward, as where rlpipe is installed.
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        print(f"{time.monotonic() - begin:7.1f} s  {name}", flush=True)

    def rlpipe(self, *arguments: str) -> str:
        """What the command printed. Ends the program with that, and with the logs of the run, where it fails."""
        with self.step(f"rlpipe {' '.join(arguments)}"):
            done = subprocess.run(
                [sys.executable, "-m", "rlpipe", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        if done.returncode != 0:
            self.fail(f"rlpipe {arguments[0]} ended with {done.returncode}:\n{done.stdout[-12000:]}")
        return done.stdout

    def fail(self, what: str) -> None:
        for log in sorted(self.folder.glob("runs/mine/logs/**/*.log")) + sorted(self.folder.glob("*.log")):
            if log.is_file() and (lines := log.read_text(errors="replace").splitlines()[-25:]):
                print(f"--- {log.relative_to(self.folder)}", *lines, sep="\n")
        sys.exit(what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of plan and training")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        way = Way(Path(folder))
        with way.step("the model in the hub's cache, rows and a reward"):
            write_inputs(way.folder)
        go(way, [*([] if DEVICE == "cuda" else ON_A_CPU), *options.settings])
    print(
        f"{time.monotonic() - begin:7.1f} s  in all, on {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'a CPU'}"
    )


def go(way: Way, overrides: list[str]) -> None:
    way.rlpipe("recipes", "copy", RECIPE)
    cluster = "local_1x141gb" if DEVICE == "cuda" else "local_cpu"
    way.rlpipe("plan", "mine.yaml", *overrides, "--cluster", cluster)
    way.rlpipe("train", "mine.yaml", *overrides)
    way.rlpipe("train", "mine.yaml", *overrides, "run.iterations=3", "--resume")
    rows = [json.loads(line) for line in (way.folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        print_iteration(row)
    if [row["iteration"] for row in rows] != [0, 1, 2, 3] or not all(trained(row) for row in rows[1:]):
        way.fail("these are not three iterations that trained")
    way.rlpipe("export", "runs/mine@2", "served")
    print(way.rlpipe("status", "runs/mine"))
    compare(way, way.folder / "served")


def trained(row: dict[str, Any]) -> bool:
    return bool(row["train/updates_applied_count"] == row["iteration"] and row["train/gradient_norm"] > 0)


def print_iteration(row: dict[str, Any]) -> None:
    shown = (
        *("rollout/reward_mean", "train/updates_applied_count", "train/gradient_norm", "mismatch/logprob_abs_mean"),
        *("time/step_seconds", "time/rollout_seconds", "perf/rollout_tokens_per_second"),
        "perf/actor_train_tflops_per_gpu",
    )
    facts = (f"{name.split('/')[1]} {row[name]:.4g}" for name in shown if row.get(name) is not None)
    print(f"           iteration {row['iteration']}: {', '.join(facts)}", flush=True)


def write_inputs(folder: Path) -> None:
    shape = json.loads((PROJECT / "configs/models/Qwen3-0.6B/config.json").read_text())
    shape = shape if DEVICE == "cuda" else tiny_model(shape)
    save_random_policy(shape, folder / "policy", "bfloat16")
    fill_vocabulary(folder / "policy/tokenizer.json", shape["vocab_size"])
    add_to_hub(folder / "hub", folder / "policy")
    rows = [{"question": f"What is {n} plus {n % 7}?", "answer": str(n + n % 7)} for n in range(528)]
    for name, part in (("rows", rows[:512]), ("test", rows[512:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "mine.yaml").write_text(SETTINGS)


def fill_vocabulary(file: Path, tokens: int) -> None:
    """Adds a word for each token that the byte tokenizer in `file` lacks, so that whatever is sampled is text."""
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary |= {f"{index:x}.": index for index in range(len(vocabulary), tokens)}
    file.write_text(json.dumps(tokenizer))


def add_to_hub(cache: Path, source: Path) -> None:
    """Lays a model's files out as a download leaves them."""
    model = cache / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / ("a" * 40)
    for folder in (model / "refs", snapshot.parent):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(snapshot.name)
    source.rename(snapshot)


def compare(way: Way, folder: Path) -> None:
    """The served policy's greedy answers, against transformers' log-probabilities of the same tokens."""
    prompts = [[row * 7 + column for column in range(12)] for row in range(8)]
    with way.step("python -m sglang.launch_server --model-path served: start, answer, stop"):
        answers = served_answers(way, folder, prompts)
    with way.step("transformers loads it and computes the same tokens"):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = model.to(DEVICE)
        gaps = torch.cat([gap(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)])
    print(f"           mean of |SGLang - transformers| {gaps.mean():.2e}, largest {gaps.max():.2e}")
    if not gaps.mean() < GAP_LIMIT:
        way.fail(f"SGLang and transformers disagree: {gaps}")
    moved = sum(not torch.equal(*pair) for pair in weights_of(way, folder))
    print(f"           {moved} tensors differ from the model that it was trained from")
    if not moved:
        way.fail("the export is the model that was trained from")


def weights_of(way: Way, folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of the export with the one of the same name that it was trained from."""
    source = next((way.folder / "hub/hub").glob("*/snapshots/*"))
    before, after = (
        {name: tensor for file in sorted(place.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for place in (source, folder)
    )
    if before.keys() != after.keys():
        way.fail(f"names of the export: {sorted(before.keys() ^ after.keys())}")
    yield from ((before[name], after[name]) for name in before)


def gap(model: Any, prompt: list[int], answer: list[tuple[float, int]]) -> torch.Tensor:
    tokens = torch.tensor([token for _, token in answer], device=DEVICE)
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens.tolist()]], device=DEVICE)).logits[0]
    logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, tokens[:, None])[:, 0]
    return (logprobs.cpu() - torch.tensor([logprob for logprob, _ in answer])).abs()


def served_answers(way: Way, folder: Path, prompts: list[list[int]]) -> list[list[tuple[float, int]]]:
    """Log-probability and id of each token of a greedy answer, from SGLang's own server without rlpipe."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    command += ["--skip-server-warmup", "--log-level", "warning"]
    environment = dict(way.environment)
    if DEVICE == "cpu":
        environment |= engine_environment("cpu", 1, way.folder, environment)
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        command += ["--max-total-tokens", "4096", "--disable-overlap-schedule", "--disable-cuda-graph"]
        command += ["--grammar-backend", "none"]
    else:
        command += ["--mem-fraction-static", "0.5", "--cuda-graph-max-bs-decode", "8", "--disable-prefill-cuda-graph"]
        command += [] if has_flash_attention_3() else ["--attention-backend", "triton"]  # SGLang does not look
    log = way.folder / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until_ready(way, server, port)
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        found = post(port, {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True})
        text = post(port, {"text": "What is 2 plus 2?", "sampling_params": sampling})["text"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    print(f"           a prompt in words is answered with {text!r}")
    return [[(logprob, token) for logprob, token, _ in one["meta_info"]["output_token_logprobs"]] for one in found]


def wait_until_ready(way: Way, server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 400
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                way.fail("SGLang's server did not start")
        time.sleep(0.5)


def post(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
