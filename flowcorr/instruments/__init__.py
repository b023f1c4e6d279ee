"""Looking at runs and stacks: one `Finding`, one `Report`, one page."""
