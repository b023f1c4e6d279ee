"""A package, so that an installed one of this name does not hide it."""
