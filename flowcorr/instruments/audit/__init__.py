"""`flowcorr audit`: the size of the gap, the effect of each preset on it, and advice."""

from flowcorr.instruments.audit.dumped import audit_folder
from flowcorr.instruments.audit.measure import audit, examine_batches
from flowcorr.instruments.audit.savings import audit_savings

__all__ = ["audit", "audit_folder", "audit_savings", "examine_batches"]
