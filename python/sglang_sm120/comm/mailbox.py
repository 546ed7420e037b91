"""The mailbox backend: the same kernels over pinned host memory, for GPUs that cannot write to each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_sm120.comm import native, slab
from sglang_sm120.comm.communicator import Communicator

if TYPE_CHECKING:
    import torch

    from sglang_sm120.comm.factory import GroupSpec


# Up to here the forms that travel in tiles are used: measured by benchmark/allreduce.py with all ranks on one PCIe link
# (see docs/kernels.md). Without the relay, larger sums and larger worlds stay with SGLang and NCCL.
LARGEST_BYTES = {2: 56 << 10, 3: 14 << 10, 4: 14 << 10}

# Whether larger sums, up to the capacity, and worlds up to 16 take the relay (flags and outboxes, csrc/core/relay.h).
# On: it passed tests/gpu/test_relay.py and is ahead of tiles from 16 (two ranks) or 4 rows (four) up;
# 3 ranks and more than 4 were not measured, so only the plan's timing speaks for them (docs/kernels.md).
RELAY = True


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
        Declined: as for the native backend, or more ranks than mailboxes are worth.
    """
    from sglang_sm120.comm.factory import Declined

    largest = LARGEST_BYTES.get(spec.world, 0)
    if largest == 0 and not RELAY:
        raise Declined(
            f"mailboxes serve {min(LARGEST_BYTES)} to {max(LARGEST_BYTES)} ranks, not {spec.world}"
        )
    node = numa_node_of(spec.device) if spec.device.type == "cuda" else -1
    return native.build_over(spec, slab.HOST_WAYS, node, largest, RELAY)
