"""Graders: pure functions from a response and a label to a reward, and the processes they run in."""

from rewards.grader_registry import GRADERS, check_grader, facts_of, grade

__all__ = ["GRADERS", "check_grader", "facts_of", "grade"]
