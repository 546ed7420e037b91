"""Right-sized NCCL communicators and a checked NCCL environment."""
