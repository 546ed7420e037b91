"""The mailbox backend: the same kernels over pinned host memory, for GPUs that cannot write to each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_sm120.comm import native_build, slab
from sglang_sm120.comm.communicator import Communicator

if TYPE_CHECKING:
    import torch

    from sglang_sm120.comm.factory import GroupSpec


# Up to here the forms that travel in tiles are used: measured by benchmark/allreduce.py with all ranks on one PCIe link
# (docs/kernels.md). Larger sums, up to the capacity, and other worlds take the relay (flags and outboxes,
# csrc/core/relay.h). At 3 ranks and more than 4 nothing was measured: there the plan's timing alone decides.
LARGEST_BYTES = {2: 56 << 10, 3: 14 << 10, 4: 14 << 10}


def numa_node_of(device: torch.device) -> int:
    """NUMA node of a GPU from the kernel's PCI tree; -1 when it does not say."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    domain = getattr(properties, "pci_domain_id", 0)
    path = Path(
        f"/sys/bus/pci/devices/{domain:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0/numa_node"
    )
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def build(spec: GroupSpec) -> Communicator:
    """The builder that `comm.factory` calls.

    Raises:
        Declined: as for the native backend.
    """
    node = numa_node_of(spec.device) if spec.device.type == "cuda" else -1
    largest = LARGEST_BYTES.get(spec.world, 0)
    return native_build.build_over(spec, slab.HOST_WAYS, node, largest, relay=True)
