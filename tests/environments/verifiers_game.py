"""An environment as people write them with verifiers: several turns with a tool, and a rubric."""

import verifiers as vf
from datasets import Dataset


def double(number: int) -> str:
    """Twice the number.

    Args:
        number: what is doubled
    """
    return str(2 * number)


def load_environment(goal: str = "42", **options) -> vf.Environment:
    rows = [{"question": f"double {number}", "answer": goal, "info": {"number": number}} for number in (21, 7, 3)]

    def right(completion, answer, **_) -> float:
        return float(answer in str(completion[-1]["content"]))

    def turns(completion, **_) -> float:
        return float(len([message for message in completion if message["role"] == "assistant"]))

    rubric = vf.Rubric(funcs=[right, turns], weights=[1.0, 0.125])
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows[:2]),
        eval_dataset=Dataset.from_list(rows[2:]),
        tools=[double],
        rubric=rubric,
        max_turns=4,
        **options,
    )
