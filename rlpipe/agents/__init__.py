"""Agents as they are, trained: an OpenAI-compatible endpoint in front of the engines, which keeps every token."""
