"""Tests of a machine, or of a machine and a run, each with what to do when it fails."""
