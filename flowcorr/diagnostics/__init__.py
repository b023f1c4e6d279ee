"""Looking at runs and stacks: what agrees, what drifts, what is broken."""
