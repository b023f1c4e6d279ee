"""Questions about what an engine returned: numbers, limits and remedies, which training and the instruments share."""
