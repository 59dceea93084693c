"""What the environment of an episode says it earned."""

from collections.abc import Mapping
from typing import Any

from rlpipe.shared.sample import Reward


def environment(response: str, label: str, environment: Mapping[str, Any] | None = None) -> Reward:
    """The rewards of the episode's turns and of its end together; correct where the environment saw a success.

    `environment` is a fact of the sample. Raises ValueError for a sample that comes from no environment.
    """
    if environment is None:
        raise ValueError("the sample comes from no environment: set rollout.generate.function to 'environment'")
    turns, end = float(environment["turn_rewards"]), float(environment["reward"] or 0.0)
    return Reward(
        score=turns + end,
        correct=environment["success"],
        reason=f"{environment['turns']} turns, ended by {environment['ended']}",
        components={"turns": turns, "end": end},
    )
