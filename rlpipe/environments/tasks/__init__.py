"""Worked examples: environments of the kinds that one meets."""
