"""Questions about an engine's samples: numbers, limits and remedies, which training and the instruments share."""
