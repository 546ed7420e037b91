"""Settings of one NCCL communicator, chosen by the name of SGLang's group.

SGLang makes two communicators for a coordinator: PyTorch's, used eagerly (prefill, broadcasts), and its own
("pynccl"), used inside CUDA graphs (decode, verify). The second never moves more than the widest captured
batch, so it gets exactly the channels that NCCL itself would use for that message: fewer cost time (measured by
benchmark/nccl_memory.py: half of them 1.1 to 1.5 times), more cost memory.

All ranks of a communicator must pass the same settings: every input here comes from the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sglang_sm120.fabric.versions import parse

ConfigValue = int | str

# Field -> first NCCL release whose ncclConfig_t has it (src/nccl.h.in of the tags).
FIELDS: Final[dict[str, tuple[int, ...]]] = {
    "min_ctas": (2, 17, 1),
    "max_ctas": (2, 17, 1),
    "cga_cluster_size": (2, 17, 1),
    "comm_name": (2, 27, 3),
    "graph_usage_mode": (2, 29, 2),
}
# Groups that carry prefill activations or KV blocks when they run eagerly.
BULK: Final = frozenset(
    {"tp", "attention_tp", "moe_tp", "moe_ep", "shared_experts_tp", "pdmux_prefill_tp"}
    | {"attn_cp", "dcp", "pp"}
)
BULK_CTAS: Final = 8
CONTROL_CTAS: Final = 4
MAX_CTAS: Final = 64  # MAXCHANNELS
# A low-latency ring takes one more channel for every 64 bytes x 512 threads of message (8 bytes per rank
# and thread; src/enqueue.cc, threadThresholds of src/graph/tuning.cc).
LL_THREADS: Final = 512
LL_BYTES_PER_RANK: Final = 8


class NcclConfigError(ValueError):
    """A setting given by the user cannot be passed to NCCL; the text names group, field and value."""


def channels_used(nbytes: int, world: int) -> int:
    """Channels that NCCL's own rule gives a low-latency ring all-reduce of `nbytes` over `world` ranks."""
    per_channel = LL_THREADS * LL_BYTES_PER_RANK * max(world, 1)
    return max(1, -(-nbytes // per_channel))


def config_for(
    group_name: str,
    *,
    captured: bool = False,
    widest_bytes: int | None = None,
    world: int = 8,
    overrides: Mapping[str, Mapping[str, ConfigValue]] | None = None,
    nccl_version: str = "",
    pcie_only: bool = True,
) -> dict[str, ConfigValue]:
    """Fields of `ncclConfig_t` for one communicator; only fields to be set are present.

    Args:
        group_name: SGLang's name ("tp", "attention_tp", "moe_tp", "pp", "world", ...), with or without
            a suffix after ":".
        captured: True for the communicator that runs inside CUDA graphs (pynccl).
        widest_bytes: bytes of the widest captured message (rows x hidden x element size), when known.
        world: ranks of the group.
        overrides: user's settings by group name; "*" applies to every group, the exact name wins.
        nccl_version: fields that this release does not know are left out; "" knows all.
        pcie_only: no NVLink between any two GPUs. Where there is, prefill uses more channels than fill a PCIe link, and
            the plugin sets no limit on eager communicators.

    Returns:
        A dict with keys of `FIELDS`. `cga_cluster_size` and `graph_usage_mode` appear only when the user asks:
        their effect on PCIe is unmeasured, and graph usage 1 is wrong once two graphs use the communicator.

    Raises:
        NcclConfigError: an override has an unknown field, a wrong type, or min_ctas > max_ctas.
    """
    name = group_name.split(":")[0]
    fields: dict[str, ConfigValue] = {"comm_name": f"sglang_{name}{'_graph' if captured else ''}"}
    limit = _ctas(name, captured, widest_bytes, world) if captured or pcie_only else None
    if limit is not None:
        fields["max_ctas"] = limit
    for key in ("*", name):
        for field, value in (overrides or {}).get(key, {}).items():
            fields[field] = _checked(key, field, value)
    low, high = int(fields.get("min_ctas", 1)), int(fields.get("max_ctas", MAX_CTAS))
    if low > high:
        raise NcclConfigError(
            f"NCCL settings of group {name!r}: min_ctas {low} is above max_ctas {high}; raise max_ctas"
        )
    known = parse(nccl_version)
    return {k: v for k, v in fields.items() if not known or known >= FIELDS[k]}


def _ctas(name: str, captured: bool, widest_bytes: int | None, world: int) -> int | None:
    """Limit of channels, or None where a limit might cost time."""
    if captured and name != "pdmux_prefill_tp":
        # NCCL never takes more than this for the widest batch; a lower limit is slower, a higher one only memory.
        return min(channels_used(widest_bytes, world), MAX_CTAS) if widest_bytes else None
    return BULK_CTAS if name in BULK else CONTROL_CTAS


def _checked(group: str, field: str, value: ConfigValue) -> ConfigValue:
    if field not in FIELDS:
        raise NcclConfigError(
            f"NCCL settings of group {group!r}: unknown field {field!r}; known: {', '.join(FIELDS)}"
        )
    if field == "comm_name":
        if isinstance(value, str) and value:
            return value
        raise NcclConfigError(
            f"NCCL settings of group {group!r}: comm_name {value!r} is not a name"
        )
    limits = {"cga_cluster_size": (0, 8), "graph_usage_mode": (0, 2)}
    low, high = limits.get(field, (1, MAX_CTAS))
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise NcclConfigError(
            f"NCCL settings of group {group!r}: {field} = {value!r} is not an integer in {low}..{high}"
        )
    return value
