"""`flowcorr report`: runs on one page."""

from flowcorr.instruments.report.page import report

__all__ = ["report"]
