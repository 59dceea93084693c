"""What a run tells: metrics and where they go, the console, the run folder, dashboards, the report."""
