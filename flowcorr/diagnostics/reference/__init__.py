"""What each metric, configuration key and preset means: for `flowcorr explain` and for the tables of the pages."""
