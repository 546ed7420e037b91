"""The `sglang-sm120` command."""
