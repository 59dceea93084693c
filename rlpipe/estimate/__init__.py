"""What a run will take: memory of a GPU by part, host memory, disk, seconds of each phase. Nothing is started."""
