"""Memory of one rank: weights, cache, NCCL's communicators with and without compact settings, and our slabs."""

from __future__ import annotations

import msgspec

from sglang_sm120.comm.schedule import slab_layout
from sglang_sm120.foresight import compute
from sglang_sm120.foresight.deployment import Setting
from sglang_sm120.nccl.config import BULK_CTAS, config_for
from sglang_sm120.nccl.memory import KIB, MIB, Buffers, communicator_bytes

# SGLang's coordinators of a tensor-parallel server that move tensors on the device; each has one communicator of
# PyTorch's for eager calls and one of its own inside CUDA graphs.
GROUPS = ("world", "tp", "attention_tp", "moe_tp")
# What NCCL opens on PCIe without limits: it tries twice the rings of its search, 8 on the machines described.
DEFAULT_CHANNELS = 8
# Channels of the plugin: target and draft.
CHANNELS = 2


class Memory(msgspec.Struct, frozen=True):
    """Per rank. GiB for weights and room, MiB for communicators and slabs, KiB per token for the cache.

    Attributes:
        weights_gib: weights, embedding and head included.
        cache_kib: cache per token of one sequence.
        nccl_mib: NCCL's buffers with its defaults; nccl_compact_mib: with the plugin's settings.
        slabs_mib: the plugin's slabs for messages up to `capacity_rows` rows.
        card_gib: the card's memory; tokens: cached tokens that fit in 95% of it, weights and the above taken off.
    """

    weights_gib: float
    cache_kib: float
    nccl_mib: float
    nccl_compact_mib: float
    slabs_mib: float
    capacity_rows: int
    card_gib: float
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether weights and at least one token fit."""
        return self.tokens > 0


def memory(setting: Setting, *, plugin: bool = True, small_bytes: int = 64 * 1024) -> Memory:
    """Memory of one rank under `setting`; `plugin` counts compact NCCL and slabs in, otherwise NCCL's defaults."""
    model, roof = setting.model, setting.roof
    world = roof.world
    rows = max(64, setting.rows)
    capacity = rows * -(-model.hidden // 256) * 512
    islands = setting.partition
    slab = slab_layout(
        world=world,
        capacity=capacity,
        small=min(small_bytes, capacity),
        islands=islands if len(islands) > 1 else None,
    ).slab
    buffers = Buffers(ll128=256 * KIB)  # what the plugin sets where no pair of GPUs has NVLink
    default = compact = 0
    for group in GROUPS:
        # The groups of the head also gather logits in graphs.
        widest = (
            2
            * setting.rows
            * (model.hidden if group == "moe_tp" else max(model.hidden, model.vocab))
        )
        for captured in (False, True):
            default += communicator_bytes(min(DEFAULT_CHANNELS, BULK_CTAS))
            fields = config_for(group, captured=captured, widest_bytes=widest, world=world)
            # A limit above what NCCL makes by itself changes nothing.
            limit = int(fields.get("max_ctas", DEFAULT_CHANNELS))
            compact += communicator_bytes(min(limit, DEFAULT_CHANNELS, BULK_CTAS), buffers)
    nccl, small, slabs = default / MIB, compact / MIB, CHANNELS * slab / MIB
    weights = compute.weight_gib(model, roof)
    cache = compute.cache_kib_per_token(model, roof)
    taken = small + slabs if plugin else nccl
    room = (0.95 * roof.card.memory_gib - weights) * 2**20 - taken * 1024
    return Memory(
        weights_gib=weights,
        cache_kib=cache,
        nccl_mib=nccl,
        nccl_compact_mib=small,
        slabs_mib=slabs,
        capacity_rows=rows,
        card_gib=roof.card.memory_gib,
        tokens=max(0, int(room / cache)),
    )
