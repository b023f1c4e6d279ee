"""The meaning of each metric, configuration key and preset, for `flowcorr explain` and for the tables of the pages."""
