"""Launching a run on a cluster: what exactly would run, and running it."""

from rlpipe.launch.command import launch

__all__ = ["launch"]
