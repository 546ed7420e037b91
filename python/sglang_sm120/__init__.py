"""SGLang plugin for GPUs that talk over PCIe only: fused collectives, compact NCCL, cost-aware verify."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sglang-sm120")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = ["__version__"]
