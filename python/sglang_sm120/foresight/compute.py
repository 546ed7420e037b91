"""Roofline of one forward pass: bytes that must be read, operations that must be done, on one rank of many.

The figures are floors: weights and cache are read once at full memory bandwidth, kernels start without gaps. Real
passes are slower; `Roof.efficiency` scales the memory side to what was measured on a machine.
"""

from __future__ import annotations

import math

import msgspec

from sglang_sm120.foresight.shapes import Layer, Matrix, Model


class Card(msgspec.Struct, frozen=True):
    """What one GPU can do: memory GB/s and GiB, dense TFLOPS by operand width, MiB of L2."""

    name: str
    memory_gbps: float
    memory_gib: float
    tflops16: float
    tflops8: float
    tflops4: float
    l2_mib: float


# NVIDIA's data sheets (dense figures); the first entry whose name occurs in the driver's name of the GPU is taken.
CARDS: tuple[Card, ...] = (
    Card("RTX PRO 6000", 1792, 95.6, 500, 1000, 2000, 128),
    Card("RTX 6000D", 1568, 83.5, 400, 800, 1600, 112),
    Card("RTX 5090", 1792, 31.8, 210, 419, 838, 96),
    Card("RTX 5080", 960, 15.9, 113, 225, 450, 64),
    Card("RTX 5060 Ti", 448, 15.9, 47, 95, 190, 32),
    Card("L40S", 864, 44.9, 362, 733, 733, 96),
    Card("H200", 4800, 140.0, 989, 1979, 1979, 50),
    Card("A800", 2039, 79.2, 312, 312, 312, 40),
    Card("V100", 900, 31.7, 125, 125, 125, 6),
)


def card_named(name: str) -> Card:
    """The card whose short name occurs in `name`; the RTX PRO 6000 when none does."""
    return next((c for c in CARDS if c.name in name), CARDS[0])


class Roof(msgspec.Struct, frozen=True):
    """Where a pass runs.

    Attributes:
        card: the GPU; world: tensor-parallel ranks; expert_ways: expert-parallel ranks (1: experts are cut like the
            rest; must divide `world`).
        efficiency: share of the memory bandwidth that weights really stream with.
        cache_bytes: bytes per cache element (2 for BF16, 1 for FP8).
    """

    card: Card
    world: int
    expert_ways: int = 1
    efficiency: float = 1.0
    cache_bytes: float = 2.0

    def __post_init__(self) -> None:
        if self.world < 1 or self.expert_ways < 1 or self.world % self.expert_ways:
            raise ValueError(
                f"expert parallel {self.expert_ways} does not divide tensor parallel {self.world}"
            )


class Cost(msgspec.Struct, frozen=True):
    """Milliseconds and bytes of one pass on one rank: `weights`, `cache` and `arithmetic` before taking the maximum."""

    ms: float
    weight_bytes: float
    cache_bytes: float
    tera_ops: float
    memory_bound: bool


def distinct_experts(experts: int, active: int, rows: int) -> float:
    """Expected number of different experts that `rows` tokens use when each picks `active` of `experts` evenly.

    Tokens of one text pick more alike than that, so this is an upper estimate.
    """
    return experts * (1.0 - (1.0 - active / experts) ** rows) if experts else 0.0


def busiest_share(distinct: float, ways: int) -> float:
    """Experts that the most loaded of `ways` expert-parallel ranks reads when `distinct` fall evenly at random.

    Mean plus the leading term of the maximum of balls in bins, sqrt(2 mean ln ways), never more than all.
    """
    mean = distinct / ways
    return min(distinct, mean + math.sqrt(2.0 * mean * math.log(ways))) if ways > 1 else distinct


def forward(model: Model, roof: Roof, rows: int, sequences: int, context: int) -> Cost:
    """One pass over `rows` tokens that belong to `sequences` sequences of `context` tokens.

    Raises:
        ValueError: fewer rows than sequences.
    """
    if rows < sequences or sequences < 1:
        raise ValueError(f"{rows} rows cannot belong to {sequences} sequences")
    total_ms = weights = cache = ops = 0.0
    memory_ms = arithmetic_ms = 0.0
    for layer in model.layers:
        w, o, arithmetic = _matrices(model, roof, layer, rows)
        c = sequences * _cache(roof, layer, context)
        memory = (w + c) / (roof.card.memory_gbps * roof.efficiency * 1e6)
        total_ms += layer.layers * max(memory, arithmetic)
        memory_ms += layer.layers * memory
        arithmetic_ms += layer.layers * arithmetic
        weights += layer.layers * w
        cache += layer.layers * c
        ops += layer.layers * o
    head = Matrix("head", model.hidden, model.vocab, "head")
    w, o, arithmetic = _matrix(model, roof, head, rows, 1.0)
    memory = w / (roof.card.memory_gbps * roof.efficiency * 1e6)
    return Cost(
        ms=total_ms + max(memory, arithmetic),
        weight_bytes=weights + w,
        cache_bytes=cache,
        tera_ops=ops + o,
        memory_bound=memory_ms + memory >= arithmetic_ms + arithmetic,
    )


def bytes_after(model: Model, roof: Roof) -> tuple[float, float]:
    """Weight bytes per rank that a prefetch can name during a sum: (after attention, after the FFN).

    After attention: router and shared expert, or the dense MLP; after the FFN: the next layer's attention
    projections. Routed experts are unknown until the router has run. Means over the model's layers.
    """
    first = second = 0.0
    for layer in model.layers:
        for m in layer.matrices:
            nbytes = m.weights * model.bits(m.kind) / 8 / _ways(roof, m) * layer.layers
            if m.kind == "attention":
                second += nbytes
            elif m.cut != "expert":
                first += nbytes
    return first / model.depth, second / model.depth


def weight_gib(model: Model, roof: Roof) -> float:
    """GiB of weights on one rank, embedding and head included."""
    total = sum(
        m.weights
        * model.bits(m.kind)
        / 8
        / (roof.world if m.cut == "expert" else _ways(roof, m))
        * layer.layers
        for layer in model.layers
        for m in layer.matrices
    )
    total += 2 * model.vocab * model.hidden * model.bits("head") / 8 / roof.world
    return total / 2**30


def cache_kib_per_token(model: Model, roof: Roof) -> float:
    """KiB that one token of one sequence keeps in the cache of one rank."""
    return (
        sum(
            (
                layer.cache_per_token / min(roof.world, layer.cache_ways) / layer.cache_stride
                + layer.index_per_token
            )
            * layer.layers
            for layer in model.layers
        )
        * roof.cache_bytes
        / 1024
    )


def _ways(roof: Roof, matrix: Matrix) -> int:
    return 1 if matrix.cut == "replicated" else roof.world


def _matrices(model: Model, roof: Roof, layer: Layer, rows: int) -> tuple[float, float, float]:
    weights = ops = arithmetic = 0.0
    for m in layer.matrices:
        share = 1.0
        if m.cut == "expert":
            distinct = distinct_experts(layer.experts, layer.active, rows)
            share = busiest_share(distinct, roof.expert_ways) * roof.expert_ways / layer.experts
        w, o, a = _matrix(model, roof, m, rows, share, layer)
        weights, ops, arithmetic = weights + w, ops + o, arithmetic + a
    return weights, ops, arithmetic


def _matrix(
    model: Model, roof: Roof, m: Matrix, rows: int, share: float, layer: Layer | None = None
) -> tuple[float, float, float]:
    """(bytes read, tera-operations, milliseconds of arithmetic) of one matrix on one rank."""
    ways = roof.world if m.cut == "expert" else _ways(roof, m)
    bits = model.bits(m.kind)
    weights = m.weights * share * bits / 8 / ways
    used = m.weights
    if m.cut == "expert" and layer is not None:
        used = m.weights * layer.active // layer.experts
    ops = 2.0 * used * rows / ways / 1e12
    peak = roof.card.tflops16
    if model.formats[m.kind] in ("fp8", "int8"):
        peak = roof.card.tflops8
    elif model.formats[m.kind] in ("nvfp4", "mxfp4"):
        peak = roof.card.tflops4
    return weights, ops, ops / peak * 1e3


def _cache(roof: Roof, layer: Layer, context: int) -> float:
    """Bytes that one sequence's cache and state cost per pass and layer on one rank."""
    entries = context / layer.cache_stride
    if layer.cache_window:
        entries = min(entries, layer.cache_window)
    read = entries * layer.cache_per_token / min(roof.world, layer.cache_ways) * roof.cache_bytes
    read += context * layer.index_per_token
    # A recurrent state is FP32, read and written, cut over the ranks' heads.
    return read + 8.0 * layer.state / roof.world
