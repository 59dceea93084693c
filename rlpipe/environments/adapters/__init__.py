"""Environments and tools of other libraries, as they are."""
