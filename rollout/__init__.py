"""SGLang rollout engines: start, generate, receive weights, stop."""
