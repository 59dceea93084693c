"""Launching a run on a cluster: what exactly would run, and running it."""

from rlpipe.commands.launch.launch_command import launch

__all__ = ["launch"]
