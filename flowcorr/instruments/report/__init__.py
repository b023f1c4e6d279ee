"""`flowcorr report`: some runs on one page."""

from flowcorr.instruments.report.page import report, write_report

__all__ = ["report", "write_report"]
