"""How rows are spread over thread blocks keeps to what the flat kernels can hold, and slabs to 32-bit offsets."""

from __future__ import annotations

import pytest
from sglang_sm120.comm.native import NativeCommunicator
from sglang_sm120.comm.native_how import spread
from sglang_sm120.comm.slab import SlabError


@pytest.mark.parametrize("limit", [8, 16, 32])
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_every_spread_fits_a_flat_kernel(limit: int, crowded: bool, norm: bool) -> None:
    # The conditions of `launch_flat` in csrc/cuda/channel.cu.
    for tiles in range(1, 65):
        for rows in (*range(1, 132), 300, 4096):
            cluster, warps, per_cta, ctas = spread(
                rows, tiles * 256, limit, norm=norm, crowded=crowded
            )
            case = (rows, tiles, cluster, warps, per_cta, ctas)
            units = -(-tiles // (cluster * warps))
            assert 32 <= warps * per_cta * 32 <= (512 if crowded else 1024), case
            assert ctas % cluster == 0 and 1 <= ctas <= limit and per_cta <= 4 and units <= 4, case
            if norm and cluster > 1:
                assert units == per_cta == 1 and ctas // cluster >= rows, case


class _HugeSlabs:
    def cuda_slab_bytes(self, *_: object) -> int:
        return 9 << 30


def test_a_capacity_beyond_32_bit_offsets_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(SlabError, match="1024 MiB makes slabs of 9216 MiB"):
        NativeCommunicator(
            "tp", 0, 2, lambda mine: [mine, mine], capacity_bytes=1 << 30, library=_HugeSlabs()
        )
