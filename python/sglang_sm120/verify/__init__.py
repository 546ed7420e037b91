"""Weight prefetch, cost model and draft-length policy for speculative verification."""
