"""Every metric, one row each: meaning, unit, healthy range, chart."""
