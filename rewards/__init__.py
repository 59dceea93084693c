"""Graders: pure functions from a response and a label to a reward, and the processes they run in."""
