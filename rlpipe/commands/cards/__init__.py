"""Cards: what was seen, where and when, and whether the code has changed since."""
