"""A grader that an untrained policy satisfies half of the time, so that a short run has something to learn from."""

from rlpipe.shared.sample import Reward


def response_is_even(response: str, label: str) -> Reward:
    """1 where the response has an even number of characters."""
    even = len(response) % 2 == 0
    return Reward(float(even), even, "even" if even else "odd")
