"""The rig of benchmark/prefetch.py and benchmark/split_verify.py: a rank, a peer behind an emulated wire, and GEMVs.

Both ranks live in one process on one GPU. The peer's kernel starts a given time after the rank's data has reached
it, so the rank waits that long in every call, whatever it computes in between.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from sglang_sm120.comm.cuda_library import cuda_library
from sglang_sm120.comm.native import NativeCommunicator
from sglang_sm120.comm.slab import Slabs
from sglang_sm120.verify.prefetch import Boundary, ranges_of
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

HIDDEN = 7168
CAPACITY = 8 << 20
GIVE_UP_NS = 1_000_000_000


@triton.jit(do_not_specialize=["wait_ns", "give_up_ns"])
def hold(records, calls, missed, wait_ns, give_up_ns, slots: tl.constexpr, words: tl.constexpr):
    """Return `wait_ns` after rank 0's record of this peer's next call has arrived; `missed` counts what never did."""
    call = tl.load(calls)
    tl.store(calls, call + 1)
    where = records + (call % slots) * words
    expected = (call & 0x7FFF) | (((call >> 15) & 0x7FFF) << 16)
    began = globaltimer()
    while (tl.load(where, volatile=True) != expected) & (globaltimer() - began < give_up_ns):
        pass
    seen = globaltimer()
    if tl.load(where, volatile=True) != expected:
        tl.store(missed, tl.load(missed) + 1)
    while globaltimer() - seen < wait_ns:
        pass


@triton.jit(do_not_specialize=["lasting_ns", "blocks"])
def occupy(memory, blocks, stop, lasting_ns, sink, words: tl.constexpr):
    """Read a large memory until told to stop, in lines that L2 gives up first: a card with less bandwidth.

    `blocks` of `words` are a power of two; `lasting_ns` bounds the loop where nobody says stop.
    """
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, words)
    block = program
    total = tl.zeros((words,), tl.int32)
    began = globaltimer()
    while (tl.load(stop, volatile=True) == 0) & (globaltimer() - began < lasting_ns):
        for _ in tl.static_range(
            16
        ):  # the clock and the word to look at cost as much as some reads
            total += tl.load(memory + block * words + lanes, eviction_policy="evict_first")
            block = (block + tl.num_programs(0)) & (blocks - 1)
    tl.store(sink + program * words + lanes, total)


@triton.jit
def gemv(
    x, w, y, rows, n, k, early: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr
):  # fmt: skip
    """y = x @ w.T for up to 16 rows; `early` starts before the kernel in front has ended and loads weights first."""
    m = tl.arange(0, 16)
    cols = tl.program_id(0) * bn + tl.arange(0, bn)
    ks = tl.arange(0, bk)
    total = tl.zeros((16, bn), tl.float32)
    if early:
        gdc_launch_dependents()
    tile = tl.load(w + cols[:, None] * k + ks[None, :], mask=(cols < n)[:, None], other=0.0)
    if early:
        gdc_wait()
    for at in range(0, k, bk):
        part = tl.load(x + m[:, None] * k + (at + ks)[None, :], mask=(m < rows)[:, None], other=0.0)
        total += tl.dot(part, tl.trans(tile))
        more = (cols < n)[:, None] & (at + bk + ks < k)[None, :]
        tile = tl.load(w + cols[:, None] * k + (at + bk + ks)[None, :], mask=more, other=0.0)
    tl.store(
        y + m[:, None] * n + cols[None, :], total.to(tl.bfloat16), mask=(m < rows)[:, None] & (cols < n)[None, :]
    )  # fmt: skip


class Pair:
    """Two ranks of one process: rank 0 is measured, rank 1 answers late."""

    def __init__(self, name: str = "pair") -> None:
        self.lib = cuda_library()
        small = CAPACITY
        nbytes = self.lib.cuda_slab_bytes(2, "", CAPACITY, small)
        self.addresses = [self.lib.slab_ipc_allocate(nbytes) for _ in range(2)]
        self.ranks = [
            NativeCommunicator(
                name, rank, 2, lambda mine: [mine] * 2, capacity_bytes=CAPACITY, timeout_ms=2000, early_launch=True,
                slabs=Slabs(list(self.addresses), nbytes, "ipc"),
            )
            for rank in range(2)
        ]  # fmt: skip
        # Ahead of everything else on the device, as kernels of another device would be.
        self.peer = torch.cuda.Stream(priority=-5)
        # One each for all graphs: torch hands out the same 32 streams again and again, and a graph on the reader's stream
        # would wait for the reader.
        self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        self.kept: list[torch.Tensor] = []
        self.calls = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.missed = torch.zeros_like(self.calls)
        offset, self._slots, records, record = self.lib.cuda_record_layout()
        self._slot_words = records * record // 4
        self._records = _words(self.addresses[1] + offset, self._slots * self._slot_words)

    def answer(self, rows: int, wait_us: float, calls: int) -> torch.cuda.CUDAGraph:
        """Rank 1's side of `calls` fused calls, each `wait_us` late, as a graph on its own stream."""
        return answers([self], rows, wait_us, calls)

    def _hold(self, wait_us: float, warm: bool = False) -> None:
        calls, missed = (t.clone() if warm else t for t in (self.calls, self.missed))
        give_up = 0 if warm else GIVE_UP_NS
        hold[(1,)](
            self._records, calls, missed, int(wait_us * 1000), give_up, self._slots, self._slot_words,
            num_warps=1,
        )  # fmt: skip

    def check(self) -> None:
        """Raise where a sum failed, or where the emulated wire never saw a record it waited for."""
        self.ranks[0].check()
        if self.missed.item():
            raise RuntimeError(
                f"the peer did not see {self.missed.item()} calls of rank 0 within {GIVE_UP_NS / 1e9:g} s each"
            )

    def close(self) -> None:
        torch.cuda.synchronize()
        for communicator in self.ranks:
            communicator.close()
        for address in self.addresses:
            self.lib.slab_ipc_release(address)


def answers(pairs: Sequence[Pair], rows: int, wait_us: float, calls: int) -> torch.cuda.CUDAGraph:
    """Rank 1's side of several pairs that share one wire: their calls in turn, each `wait_us` late, on one stream."""
    part = torch.randn(rows, HIDDEN, device="cuda").mul(0.1).bfloat16()
    residual = torch.zeros_like(part)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    pairs[0].kept += [part, residual, weight]  # graphs keep addresses, not tensors
    pairs[0]._hold(0.0, warm=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=pairs[0].peer):
        for _ in range(calls):
            for one in pairs:
                one._hold(wait_us)
                one.ranks[1].all_reduce_rmsnorm(part, residual, weight, 1e-6)
    return graph


def _words(address: int, count: int) -> torch.Tensor:
    """int32 view of `count` words of device memory."""

    class Memory:
        __cuda_array_interface__ = {
            "shape": (count,), "typestr": "<i4", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device="cuda")


@dataclass(frozen=True)
class Gemm:
    """One projection y = x @ w.T of [rows, inputs].

    Attributes:
        static: what it multiplies where the chain does not hand it the normed sum; rows as many as any chain has.
    """

    name: str
    multiply: Callable[[torch.Tensor], torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    static: torch.Tensor

    def run(self, x: torch.Tensor | None, rows: int) -> torch.Tensor:
        return self.multiply(self.static[:rows] if x is None else x)


# Kimi-K2.5 under TP 8 (hidden 7168, 64 heads, q rank 1536, kv rank 512 + 64, 384 experts, expert width 2048):
# (name, outputs, inputs) that follow each sum. The router stays bf16 in every format.
AFTER_FFN = (("qkv_a", 2112, 7168), ("q_b", 1536, 1536), ("o_proj", 7168, 1024))
AFTER_ATTENTION = (("router", 384, 7168), ("gate_up", 512, 7168), ("down", 7168, 256))
GROUP, INNER = 32, 8  # INT4: weights per scale, packing


def make_gemm(name: str, n: int, k: int, rows: int, how: str) -> Gemm:
    """A projection with random weights.

    Args:
        how: "bf16" (cuBLAS), "triton" or "triton early" (bf16), "int4" (torch's packed INT4, groups of 32).
    """
    static = torch.randn(rows, k, device="cuda").mul(0.1).bfloat16()
    if how == "int4" and name != "router":
        packed = torch.ops.aten._convert_weight_to_int4pack(
            torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"), INNER
        )
        scales = torch.randn(k // GROUP, n, 2, device="cuda").mul(0.01).bfloat16()

        def int4(x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)

        return Gemm(name, int4, (packed, scales), static)
    weight = torch.randn(n, k, device="cuda").mul(0.02).bfloat16()
    if not how.startswith("triton"):
        return Gemm(name, lambda x: x @ weight.t(), (weight,), static)
    early = how == "triton early"

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape[0], n, dtype=torch.bfloat16, device="cuda")
        bn = 16
        gemv[(triton.cdiv(n, bn),)](
            x, weight, y, x.shape[0], n, k, early, bn, 256, num_warps=4, num_stages=1, launch_pdl=early
        )  # fmt: skip
        return y

    return Gemm(name, run, (weight,), static)


def make_steps(layers: int, rows: int, how: str) -> list[list[Gemm]]:
    """What follows each sum of `layers` layers; nothing if `how` is "none"."""
    groups = (AFTER_FFN, AFTER_ATTENTION)
    return [
        [] if how == "none" else [make_gemm(*g, rows, how) for g in groups[i % 2]]
        for i in range(2 * layers)
    ]


class Chain:
    """A fused sum before each step, then the step's projections. The first, and what stands beside a router, read it."""

    def __init__(self, pair: Pair, rows: int, steps: Sequence[Sequence[Gemm]]) -> None:
        self.pair, self.rows, self.steps = pair, rows, steps
        self.x = torch.randn(rows, HIDDEN, device="cuda").mul(0.1).bfloat16()
        self.residual = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")

    def boundaries(self) -> list[Boundary]:
        """What is read after each sum, for the planner."""
        return [
            Boundary(
                i // 2, ("ffn", "attention")[i % 2], tuple(g.name for g in step),
                tuple(ranges_of(t for g in step for t in g.tensors)),
            )
            for i, step in enumerate(self.steps)
        ]  # fmt: skip

    def run(self, before: Callable[[int], None] = lambda i: None) -> torch.Tensor:
        """One pass on the current stream; `before(i)` comes ahead of sum i. Returns the last residual."""
        state = (self.x, self.residual)
        for i in range(len(self.steps)):
            before(i)
            state = self.step(i, *state)
        return state[1]

    def step(
        self, i: int, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum i and what follows it: (what the next sum adds up, residual)."""
        normed, residual = self.pair.ranks[0].all_reduce_rmsnorm(x, residual, self.norm, 1e-6)
        for place, gemm in enumerate(self.steps[i]):
            reads = place == 0 or (place == 1 and self.steps[i][0].name == "router")
            x = gemm.run(normed if reads else None, self.rows)
        return x, residual

    def warm(self) -> None:
        """Compile, choose algorithms and allocate workspaces, outside any capture."""
        for step in self.steps[:2]:
            for gemm in step:
                gemm.run(None, self.rows)
        torch.cuda.synchronize()

    def capture(
        self,
        before: Callable[[int], None] = lambda i: None,
        after: Callable[[], None] = lambda: None,
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The pass as a graph and the tensor that it leaves; `after()` ends the capture, to join streams."""
        self.warm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.run(before)
            after()
        return graph, out


class Reader:
    """Takes memory bandwidth away, so that what remains is about that of another card.

    It fills as few multiprocessors as do it and leaves the others alone: a cluster of the chain's kernels needs several
    free ones beside each other, and beside many thin readers it waited for their end.

    Args:
        leaves: bytes per microsecond to leave.
    """

    WORDS = 8192  # int32 per load and thread block
    MOST_CTAS = 40
    LONGEST_US = 50_000.0  # bound of one run

    def __init__(self, leaves: float) -> None:
        self.memory = torch.zeros(1 << 30, dtype=torch.int32, device="cuda")
        self.sink = torch.zeros(self.MOST_CTAS * self.WORDS, dtype=torch.int32, device="cuda")
        self.stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.stream, self._other = torch.cuda.Stream(), torch.cuda.Stream()
        self.ctas = 0
        found: dict[float, tuple[int, float]] = {}
        for ctas in range(8, self.MOST_CTAS + 1, 4):
            self.ctas = ctas
            left = memory_bandwidth(self)
            found[abs(left - leaves)] = (ctas, left)
        self.ctas, self.left = found[min(found)]

    def begin(self) -> None:
        """Read from now on, until `end_after`."""
        with torch.cuda.stream(self.stream):
            self.stop.zero_()
            occupy[(self.ctas,)](
                self.memory, self.memory.numel() // self.WORDS, self.stop, int(self.LONGEST_US * 1000), self.sink,
                self.WORDS, num_warps=32,
            )  # fmt: skip

    def end_after(self, event: torch.cuda.Event) -> None:
        """End the reading once `event` has happened."""
        with torch.cuda.stream(self._other):
            self._other.wait_event(event)
            self.stop.fill_(1)


class Timer:
    """Times graphs of rank 0, each with the peer's graph that answers it.

    Args:
        reader: what else uses the memory meanwhile.
    """

    def __init__(self, pair: Pair, reader: Reader | None = None) -> None:
        self.pair = pair
        self.reader = reader

    def once(self, graph: torch.cuda.CUDAGraph, peer: torch.cuda.CUDAGraph) -> float:
        """Microseconds of one replay.

        Raises:
            RuntimeError: the reader reached its bound, so that the graph may have run without it at the end.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self.reader:
            self.reader.begin()
        with torch.cuda.stream(self.pair.peer):
            peer.replay()
        with torch.cuda.stream(self.pair.stream):
            begin.record()
            graph.replay()
            end.record()
        if self.reader:
            self.reader.end_after(end)
        torch.cuda.synchronize()
        us = begin.elapsed_time(end) * 1000
        if self.reader and us > self.reader.LONGEST_US / 2:
            raise RuntimeError(
                f"a graph took {us:.0f} us beside {self.reader.ctas} CTAs that read: they keep its kernels out"
            )
        return us

    def compare(
        self,
        graphs: Sequence[torch.cuda.CUDAGraph],
        peer: torch.cuda.CUDAGraph,
        blocks: int = 4,
        each: int = 6,
    ) -> list[float]:
        """Median microseconds of each graph, in blocks that go forth and back (A-B-B-A)."""
        seen: list[list[float]] = [[] for _ in graphs]
        for graph in graphs:
            self.once(graph, peer)
        for block in range(blocks):
            order = list(range(len(graphs)))
            for index in order if block % 2 == 0 else order[::-1]:
                seen[index] += [self.once(graphs[index], peer) for _ in range(each)]
        self.pair.check()
        return [statistics.median(values) for values in seen]


def memory_bandwidth(reader: Reader | None = None) -> float:
    """Bytes per microsecond that a reduction over 2 GiB reads, beside a reader if there is one."""
    big = torch.zeros(1 << 29, dtype=torch.float32, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seen = []
    for _ in range(5):
        if reader:
            reader.begin()
        begin.record()
        big.sum()
        end.record()
        if reader:
            reader.end_after(end)
        torch.cuda.synchronize()
        seen.append(big.numel() * 4 / (begin.elapsed_time(end) * 1000))
    return statistics.median(seen)


@contextmanager
def pair(name: str = "pair") -> Iterator[Pair]:
    made = Pair(name)
    try:
        yield made
    finally:
        made.close()


def rig_name() -> str:
    """The GPU, for titles."""
    gpu: Any = torch.cuda.get_device_properties(0)
    return f"{gpu.name}, L2 {gpu.L2_cache_size / 2**20:.0f} MiB"
