"""The meaning of each metric, configuration key, preset, check and interface: `flowcorr explain`."""
