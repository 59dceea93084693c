"""Collective operations: what is wrapped, and who listens."""
