"""`rlpipe plan`: the estimate of a run as text."""
