"""Defects that run to the end with a finite loss and hurt what is learned, or feign it: each has to turn a learning
gate red (`python benchmarks/learning_gates.py --planted`)."""

from planting import Defect

_LEARNING_GATE = "benchmarks/test_gates_and_parity.py::test_a_gate_sees_a_defect_that_no_loss_shows"


def _in_gate(gate: str, name: str, file: str, old: str, new: str) -> tuple[str, Defect]:
    return gate, Defect(name, file, old, new, _LEARNING_GATE, gate)


GATE_DEFECTS = (
    _in_gate(
        "grpo",
        "advantages of the wrong sign",
        "rlpipe/batching/sequences.py",
        "        advantages=_predicting(advantages, prompt, response),",
        "        advantages=-_predicting(advantages, prompt, response),",
    ),
    _in_gate(
        "kl",
        "ten times the weight of the divergence",
        "actor/losses/objective.py",
        "token_loss = token_loss + options.kl.coefficient * terms",
        "token_loss = token_loss + 10 * options.kl.coefficient * terms",
    ),
    _in_gate(
        "lora",
        "a tenth of the learning rate",
        "actor/optimizer.py",
        'group["lr"] = self.learning_rate * group["lr_mult"]',
        'group["lr"] = 0.1 * self.learning_rate * group["lr_mult"]',
    ),
    _in_gate(
        "gspo",
        "the reward of another sample",
        "rlpipe/generation/producer.py",
        "        return tuple(branch.changed(reward=reward) for branch in episode)",
        "        last, self._last = getattr(self, '_last', reward), reward\n"
        "        return tuple(branch.changed(reward=last) for branch in episode)",
    ),
    _in_gate(
        "cispo",
        "what was right is not learned from",
        "actor/losses/clipped_variants.py",
        "token_loss=-inputs.advantages * weight * inputs.logprobs,",
        "token_loss=-inputs.advantages.clamp(max=0) * weight * inputs.logprobs,",
    ),
    _in_gate(
        "hybrid",
        "ten times the learning rate",
        "actor/optimizer.py",
        'group["lr"] = self.learning_rate * group["lr_mult"]',
        'group["lr"] = 10 * self.learning_rate * group["lr_mult"]',
    ),
    _in_gate(
        "arithmetic",
        "an answer is right whose first digit is",
        "rewards/mathematics.py",
        "if any(equivalent(candidate, answer) for answer in answers):",
        "if any(equivalent(candidate[:1], answer[:1]) for answer in answers):",
    ),
    _in_gate(
        "calculator",
        "the loss of an iteration is not a number",
        "actor/losses/objective.py",
        '{"train/loss": token_loss, **terms}',
        '{"train/loss": token_loss * float("nan"), **terms}',
    ),
)
"""Gate and defect."""
