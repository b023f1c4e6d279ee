"""`flowcorr audit`: how large the gap is, what each preset would make of it, and what to do about it."""

from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.audit.measure import audit, examine_batches
from flowcorr.instruments.audit.savings import audit_savings

__all__ = ["audit", "audit_folder", "audit_savings", "examine_batches"]
