"""Memory and time of a run, computed before anything is loaded, and whether it fits on a GPU."""
