"""`flowcorr report`: some runs on one page."""

from flowcorr.diagnostics.report.page import write_report

__all__ = ["write_report"]
