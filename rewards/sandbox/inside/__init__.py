"""Code that runs inside the sandbox: standard library only, handed over as text by `rewards.sandbox.program`."""
