"""Communicators, slab exchange, plan and dispatch; calls `csrc`, never `hooks`."""
