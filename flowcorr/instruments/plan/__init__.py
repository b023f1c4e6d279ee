"""Predicts the memory and time of a run, and whether it fits on a GPU, without loading a model."""
