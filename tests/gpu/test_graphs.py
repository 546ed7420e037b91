"""CUDA graphs: any mix of graphs, eager calls and streams gives the right sums."""

from __future__ import annotations

import pytest
import torch
from rig import VirtualGroup, canonical_sum, inputs


class Captured:
    """One graph per rank of `calls` sums over fixed inputs."""

    def __init__(self, group: VirtualGroup, rows: int, hidden: int, calls: int, seed: int) -> None:
        self.group, self.calls = group, calls
        self.parts, _, _ = inputs(group.world, rows, hidden, seed=seed)
        self.outs: list[list[torch.Tensor]] = []
        self.graphs = []
        for rank, communicator in enumerate(group.ranks):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                self.outs.append([communicator.all_reduce(self.parts[rank]) for _ in range(calls)])
            self.graphs.append(graph)

    def replay(self, seed: int, streams: list[torch.cuda.Stream] | None = None) -> None:
        g = torch.Generator(device="cuda").manual_seed(seed)
        for part in self.parts:
            part.copy_(torch.randn(part.shape, generator=g, device="cuda").to(part.dtype))
        for outs in self.outs:
            for out in outs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        for rank, graph in enumerate(self.graphs):
            with torch.cuda.stream((streams or self.group.streams)[rank]):
                graph.replay()
        torch.cuda.synchronize()
        expected = canonical_sum(self.parts)
        for outs in self.outs:
            for out in outs:
                assert torch.equal(out, expected)


@pytest.mark.parametrize("world", [2, 4])
def test_first_call_ever_is_captured(world: int) -> None:
    with VirtualGroup(world) as group:
        captured = Captured(group, 4, 7168, 3, seed=1)
        for step in range(4):
            captured.replay(step)


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_of_different_sizes_eager_calls_and_other_streams_take_turns(world: int) -> None:
    with VirtualGroup(world) as group:
        graphs = [
            Captured(group, rows, hidden, calls, seed=calls)
            for rows, hidden, calls in ((1, 7168, 2), (64, 7168, 3), (8, 2880, 7), (16, 6144, 1))
        ]
        others = [torch.cuda.Stream() for _ in range(world)]
        for step in range(24):
            graphs[step * 7 % 4].replay(step, others if step % 5 == 4 else None)
            if step % 3 == 0:
                parts, _, _ = inputs(world, 1 + step, 7168, seed=step)
                for out in group.sum(parts):
                    assert out is not None and torch.equal(out, canonical_sum(parts))


@pytest.mark.parametrize(
    ("world", "calls", "replays"),
    [(2, 100, 1000), pytest.param(2, 1, 1_000_000, marks=pytest.mark.soak)],
)
def test_long_runs_of_replays(world: int, calls: int, replays: int) -> None:
    with VirtualGroup(world) as group:
        captured = Captured(group, 2, 1024, calls, seed=3)
        captured.replay(0)
        for _ in range(replays):
            for rank, graph in enumerate(captured.graphs):
                with torch.cuda.stream(group.streams[rank]):
                    graph.replay()
        torch.cuda.synchronize()
        captured.replay(9)
        assert not any(c.failed for c in group.ranks)
