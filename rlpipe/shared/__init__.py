"""What driver and workers both know: plain types and small tools that import no other room."""
