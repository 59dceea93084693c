"""Layers of the policy: one implementation for CPU and CUDA, packed sequences (THD) only."""
