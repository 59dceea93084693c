"""Hugging Face weights: one table, read in slices, streamed out."""
