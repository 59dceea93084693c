"""Log-probabilities of given sequences under transformers, one sequence at a time, on the CPU.

Reads {"policy": folder, "dtype": name, "sequences": [[token, ...], ...]} as JSON from its standard input, and writes
those of all tokens of each sequence but its first.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    asked = json.load(sys.stdin)
    if torch.cuda.is_available():
        sys.exit("a GPU is visible, whose kernels transformers would take for tensors of the CPU: hide it")
    dtype = getattr(torch, asked["dtype"])
    model = AutoModelForCausalLM.from_pretrained(asked["policy"], dtype=dtype, attn_implementation="eager").eval()
    json.dump([logprobs(model, torch.tensor([ids])) for ids in asked["sequences"]], sys.stdout)


def logprobs(model: torch.nn.Module, ids: torch.Tensor) -> list[float]:
    """ids: int64 [1, t]; returns t - 1 of them, in nats."""
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    found: list[float] = torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


if __name__ == "__main__":
    main()
