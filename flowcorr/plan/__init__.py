"""What a run will need, before anything is loaded: memory, time, and what fits on a GPU."""
