"""`flowcorr audit`: how large the gap between rollout engine and actor is, and what to do about it."""

from flowcorr.diagnostics.audit.measure import AuditReport, audit, examine_batches

__all__ = ["AuditReport", "audit", "examine_batches"]
