"""flowcorr inside other trainers: their batches are converted here, and nowhere else."""
