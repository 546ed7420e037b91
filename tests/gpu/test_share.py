"""A broadcast by one sum: rank 0's integers on every rank, eager and captured; what does not fit is left alone."""

from __future__ import annotations

import pytest
import torch
from rig import VirtualGroup
from sglang_sm120.comm.share import MOST, share_from_rank_0

SPECIAL = (0, 1, -1, 2**31 - 1, -(2**31), 0x8000, -0x8000, 0xFFFF, -0x10000, 0x7FFF8000)


def of_rank(rank: int, sizes: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """int32 tensors of those sizes, other ones on every rank, special values among them."""
    generator = torch.Generator().manual_seed(seed * 97 + rank)
    out = []
    for size in sizes:
        values = torch.randint(-(2**31), 2**31, (size,), generator=generator)
        few = min(size, len(SPECIAL))
        values[:few] = torch.tensor(SPECIAL[:few]) if rank == 0 else rank
        out.append(values.to(torch.int32).cuda())
    return out


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("sizes", [(1,), (4, 4, 1), (128, 128, 32), (1, 7, 300, 3), (3000, 1)])
def test_every_rank_has_rank_0s_integers(world: int, sizes: tuple[int, ...]) -> None:
    with VirtualGroup(world) as group:
        tensors = [of_rank(r, sizes, seed=1) for r in range(world)]
        expected = [t.clone() for t in tensors[0]]
        torch.cuda.synchronize()
        for rank, communicator in enumerate(group.ranks):
            with torch.cuda.stream(group.streams[rank]):
                assert share_from_rank_0(communicator, tensors[rank])
        torch.cuda.synchronize()
        for mine in tensors:
            assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_a_captured_broadcast_replays_with_new_values() -> None:
    sizes, world = (16, 16, 4), 2
    with VirtualGroup(world) as group:
        tensors = [of_rank(r, sizes, seed=2) for r in range(world)]
        torch.cuda.synchronize()
        graphs = []
        for rank, communicator in enumerate(group.ranks):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                assert share_from_rank_0(communicator, tensors[rank])
            graphs.append(graph)
        for turn in range(5):
            for rank in range(world):
                for held, new in zip(tensors[rank], of_rank(rank, sizes, turn), strict=True):
                    held.copy_(new)
            torch.cuda.synchronize()
            for rank, graph in enumerate(graphs):
                with torch.cuda.stream(group.streams[rank]):
                    graph.replay()
            torch.cuda.synchronize()
            for mine in tensors:
                expected = of_rank(0, sizes, turn)
                assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def test_what_does_not_fit_is_refused_and_left_alone() -> None:
    with VirtualGroup(2) as group:
        communicator = group.ranks[0]
        ones = torch.ones(4, dtype=torch.int32, device="cuda")
        for unfit in ([ones.long()], [ones[::2]], [ones] * (MOST + 1), [ones[:0]]):
            assert not share_from_rank_0(communicator, unfit)
        assert bool((ones == 1).all()) and not communicator.failed
    lib = group.lib
    row = torch.empty(8, dtype=torch.float32, device="cuda")
    with pytest.raises(ValueError, match="5 words in a row of 8 halves"):
        lib.cuda_share_pack([ones.data_ptr(), 5], True, row, 0)
    with pytest.raises(ValueError, match="1 to 4 arrays"):
        lib.cuda_share_pack([], True, row, 0)
    with pytest.raises(TypeError, match="float32"):
        lib.cuda_share_pack([ones.data_ptr(), 4], True, row.half(), 0)
