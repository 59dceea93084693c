"""What updates of pure noise do to a policy that a warm start has just made, with fresh and with warmed-up moments.

    python benchmarks/first_updates.py

A tiny policy is shown worked sums, then updated by policy gradients whose advantages are drawn at random: nothing can
be learned from them, so held-out accuracy can only fall. Rows are compared where their learning rates add up to the
same, in units of the peak: what falls more there owes it to the size of Adam's first updates, or to having seen fewer
gradients on the same way (docs/algorithms.md). The last row begins with a policy whose warm start went on for some
steps at a tenth of its learning rate.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rlpipe.config.actor import OptimizerConfig
from rlpipe.config.model import ArithmeticTaskConfig, TinyPolicyConfig
from rlpipe.prepare.arithmetic import arithmetic_rows
from rlpipe.prepare.tiny_policy import make_tiny_policy

OPTIMIZER = OptimizerConfig()
WARM_START_STEPS, WARM_START_SEQUENCES = 110, 96
PROBLEMS, SAMPLES, RESPONSE_TOKENS = 64, 4, 26
PEAK = 3e-4
SUMS = (1, 2, 3, 4)
"""Sums of learning rates, in units of the peak, at which accuracy is compared."""

NOISES = (1, 2, 3, 4)
"""Seeds of noise, over which each accuracy is the mean."""

COOLING_STEPS, COOLING_SHARE = 40, 0.1
"""Further steps of the warm start, and their learning rate, of its own."""


@dataclass(frozen=True)
class Variant:
    """How noise is followed. warmup: updates of linear warm-up. seen: gradients that the moments have seen before the
    first update. share: of the peak learning rate. cooled: after the cooled warm start."""

    name: str
    warmup: int
    seen: int = 0
    share: float = 1.0
    cooled: bool = False


VARIANTS = (
    Variant("warm-up of 1", 1),
    Variant("warm-up of 5", 5),
    Variant("warm-up of 20", 20),
    Variant("1, warmed-up moments", 1, seen=40),
    Variant("20, a quarter of the rate", 20, share=0.25),
    Variant("5, cooled warm start", 5, cooled=True),
)


@dataclass(frozen=True)
class Batch:
    """Prompts with responses: token ids [n, t], and which predictions are of response tokens, float32 [n, t - 1]."""

    tokens: torch.Tensor
    mask: torch.Tensor

    def logprobs(self, model: PreTrainedModel) -> torch.Tensor:
        """Of each next token, [n, t - 1]."""
        logits: torch.Tensor = model(self.tokens).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, self.tokens[:, 1:, None])[..., 0]

    def part(self, rows: torch.Tensor) -> "Batch":
        return Batch(self.tokens[rows], self.mask[rows])


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_policy(TinyPolicyConfig(layers=3), Path(folder) / "policy", seed=0)
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "policy", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "policy")
    settings = ArithmeticTaskConfig(digits=2, operands=2, train_problems=4096, test_problems=128)
    train, test = ([dict(row) for row in rows] for rows in arithmetic_rows(settings, 0))
    held_out = worked(test, tokenizer)
    examples = worked(train, tokenizer)
    warm_start(model, examples, WARM_START_STEPS)
    hot = weights_of(model)
    warm_start(model, examples, COOLING_STEPS, COOLING_SHARE)
    cooled = weights_of(model)
    after_cooling = accuracy(model, held_out)
    model.load_state_dict(hot)
    print(f"held-out accuracy {accuracy(model, held_out):.1%} after the warm start, peak learning rate {PEAK:g}")
    print(f"{COOLING_STEPS} steps later at {COOLING_SHARE:g} of its learning rate {after_cooling:.1%}")
    pool = sampled(model, tokenizer, train[:PROBLEMS])
    print(f"{'sum of learning rates':28}" + "".join(f"{total:>9}" for total in SUMS))
    for variant in VARIANTS:
        rows = []
        for seed in NOISES:
            model.load_state_dict(cooled if variant.cooled else hot)
            rows.append(noisy_updates(model, pool, held_out, variant, seed))
        means = map(fmean, zip(*rows, strict=True))
        print(f"{variant.name:28}" + "".join(f"{value:9.1%}" for value in means), flush=True)


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def warm_start(model: PreTrainedModel, examples: Batch, steps: int, share: float = 1.0) -> None:
    """Supervised steps on worked sums, as a warm start makes them, at this share of its learning rate."""
    adam = torch.optim.Adam(model.parameters(), lr=0.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2))
    for step in range(1, steps + 1):
        adam.param_groups[0]["lr"] = 3e-3 * share * min(1.0, step / 10)
        batch = examples.part(torch.randint(len(examples.tokens), (WARM_START_SEQUENCES,)))
        update(model, adam, -(batch.logprobs(model) * batch.mask).sum() / batch.mask.sum())


def noisy_updates(model: PreTrainedModel, pool: Batch, held_out: Batch, variant: Variant, seed: int) -> list[float]:
    """Held-out accuracy when the learning rates have added up to each of SUMS."""
    torch.manual_seed(seed)
    adam = torch.optim.Adam(model.parameters(), lr=0.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2))
    found: list[float] = []
    total, step = 0.0, -variant.seen
    while len(found) < len(SUMS):
        step += 1
        share = variant.share * min(1.0, step / variant.warmup) if step > 0 else 0.0
        adam.param_groups[0]["lr"] = PEAK * share
        update(model, adam, noise(model, pool))
        total += share
        if total >= SUMS[len(found)] - 1e-9:
            found.append(accuracy(model, held_out))
    return found


def noise(model: PreTrainedModel, pool: Batch) -> torch.Tensor:
    """The loss of GRPO with scores that were drawn, normalized by group."""
    scores = torch.randn(PROBLEMS, SAMPLES)
    advantages = ((scores - scores.mean(1, keepdim=True)) / scores.std(1, keepdim=True)).reshape(-1)
    rows = torch.randperm(len(pool.tokens))[: len(pool.tokens) // 2]
    batch = pool.part(rows)
    return -(batch.logprobs(model) * batch.mask * advantages[rows, None]).sum() / batch.mask.sum()


def update(model: PreTrainedModel, adam: torch.optim.Adam, loss: torch.Tensor) -> None:
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_gradient_norm)
    adam.step()


@torch.no_grad()
def accuracy(model: PreTrainedModel, examples: Batch) -> float:
    """Share of worked sums that greedy decoding writes token by token."""
    right = model(examples.tokens).logits[:, :-1].argmax(-1) == examples.tokens[:, 1:]
    return float((right | (examples.mask == 0)).all(1).float().mean())


@torch.no_grad()
def sampled(model: Any, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, Any]]) -> Batch:
    """SAMPLES responses of the policy to each row's prompt."""
    prompts = [ids for row in rows for ids in [prompt_of(row, tokenizer)] * SAMPLES]
    length = max(map(len, prompts))
    tokens = torch.tensor([[tokenizer.pad_token_id] * (length - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
    chosen = {"do_sample": True, "top_k": 0, "max_new_tokens": RESPONSE_TOKENS, "pad_token_id": tokenizer.pad_token_id}
    written = model.generate(tokens, attention_mask=mask, **chosen)[:, length:].tolist()
    end = tokenizer.eos_token_id
    return batch_of(prompts, [ids[: ids.index(end) + 1] if end in ids else ids for ids in written], tokenizer)


def worked(rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Prompts with their worked solutions."""
    answers = [tokenizer(row["solution"], add_special_tokens=False)["input_ids"] for row in rows]
    prompts = [prompt_of(row, tokenizer) for row in rows]
    return batch_of(prompts, [[*ids, tokenizer.eos_token_id] for ids in answers], tokenizer)


def prompt_of(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids: Any = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    return list(ids)


def batch_of(prompts: Sequence[list[int]], answers: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase) -> Batch:
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(prompts), length), tokenizer.pad_token_id)
    mask = torch.zeros(len(prompts), length - 1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = prompt + answer
        tokens[row, : len(whole)] = torch.tensor(whole)
        mask[row, len(prompt) - 1 : len(whole) - 1] = 1
    return Batch(tokens, mask)


if __name__ == "__main__":
    main()
