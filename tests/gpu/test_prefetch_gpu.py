"""Prefetch: no result changes whoever asks for the memory, and what was asked for is in L2 afterwards."""

from __future__ import annotations

import statistics

import pytest
import torch
from rig import VirtualGroup, canonical_sum, inputs, reference_norm, ulps
from sglang_sm120.verify.prefetch import Range, chunks_of

MIB = 1 << 20


def chunks_over(memory: torch.Tensor) -> torch.Tensor:
    ranges = chunks_of([Range(memory.data_ptr(), memory.numel() * memory.element_size())])
    return torch.tensor([(r.pointer, r.bytes) for r in ranges], dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_fused_results_stay_whoever_prefetches(world: int) -> None:
    weights = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    chunks = chunks_over(weights)
    with VirtualGroup(world) as group:
        for step, (rows, hidden) in enumerate([(1, 7168), (5, 2880), (16, 7168), (64, 1024)] * 3):
            # A call without follows, which clears and counts as always.
            ctas = (1, 3, 8)[step // 4]
            for count in (len(chunks), 0, 1):
                parts, residual, weight = inputs(world, rows, hidden, seed=step)
                for communicator in group.ranks:
                    communicator.prefetch_in_next(chunks, 0, count, ctas)
                total = canonical_sum(parts)
                exact, expected = reference_norm(total, residual, weight, 1e-6)
                for normed, residual_out in group.norm(parts, residual, weight):
                    assert torch.equal(residual_out, expected)
                    assert ulps(normed, exact) <= 1
                for out in group.sum(parts):
                    assert torch.equal(out, total)
        assert not any(c.failed for c in group.ranks)


def test_a_captured_prefetch_replays() -> None:
    weights = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    chunks = chunks_over(weights)
    with VirtualGroup(2) as group:
        parts, residual, weight = inputs(2, 4, 7168)
        outs, graphs = [], []
        for rank, communicator in enumerate(group.ranks):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=group.streams[rank]):
                for ctas in (1, 16):
                    communicator.prefetch_in_next(chunks, 0, len(chunks), ctas)
                    outs.append(
                        communicator.all_reduce_rmsnorm(parts[rank], residual, weight, 1e-6)
                    )
            graphs.append(graph)
        for _ in range(50):
            for rank, graph in enumerate(graphs):
                with torch.cuda.stream(group.streams[rank]):
                    graph.replay()
        torch.cuda.synchronize()
        _, expected = reference_norm(canonical_sum(parts), residual, weight, 1e-6)
        assert all(torch.equal(residual_out, expected) for _, residual_out in outs)


def test_prefetched_memory_is_read_faster() -> None:
    gpu = torch.cuda.get_device_properties(0)
    memory = torch.zeros(gpu.L2_cache_size // 3, dtype=torch.uint8, device="cuda").view(torch.int32)
    chunks = chunks_over(memory)
    flush = torch.zeros(gpu.L2_cache_size * 4, dtype=torch.uint8, device="cuda")
    with VirtualGroup(2) as group:
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(20):
            for prefetched in (True, False):
                flush.add_(1)
                if prefetched:
                    stream = torch.cuda.current_stream().cuda_stream
                    group.lib.cuda_prefetch(chunks, 0, len(chunks), 64, stream)
                torch.cuda._sleep(200_000)  # longer than the loads take
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                memory.sum()
                end.record()
                torch.cuda.synchronize()
                times[prefetched].append(begin.elapsed_time(end) * 1000)
    warm, cold = (statistics.median(times[p]) for p in (True, False))
    print(
        f"{memory.numel() * 4 / MIB:.0f} MiB summed in {warm:.1f} us prefetched, {cold:.1f} us cold"
    )
    assert warm < 0.95 * cold


def test_a_wrong_array_is_refused() -> None:
    with VirtualGroup(2) as group:
        flat = torch.zeros(8, dtype=torch.int64, device="cuda")
        with pytest.raises(TypeError, match="int64"):
            group.lib.cuda_prefetch(flat, 0, 1, 1, 0)
        pairs = flat.view(4, 2)
        with pytest.raises(ValueError, match="chunks 2 to 5 of 4"):
            group.lib.cuda_prefetch(pairs, 2, 3, 1, 0)
        with pytest.raises(ValueError, match="needs a CTA"):
            group.lib.cuda_prefetch(pairs, 0, 3, 0, 0)
