"""Launching a run on a cluster: what exactly would run, running it, and what becomes of it."""

from rlpipe.commands.launch.jobs import cancel_job, job_status, requeue_job
from rlpipe.commands.launch.launch_command import launch

__all__ = ["cancel_job", "job_status", "launch", "requeue_job"]
