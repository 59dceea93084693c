"""Receiving weights: where buckets come from, and how they reach the model."""
