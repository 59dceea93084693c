"""A grader that says everything it knows."""

import os

from rlpipe.shared.sample import Reward


def tell(response: str, label: str, api_key: str = "", url: str = "") -> Reward:
    """Its options, its environment, and some learning signal."""
    print("printed", api_key, url)
    return Reward(float(len(response) % 2), None, f"{api_key} asked {url}; {sorted(os.environ.items())}")
