"""Which weights to load into L2 while a sum is on the wire: address ranges per all-reduce, nothing else.

After the attention's sum comes the FFN: of a mixture the router and the shared expert (the routed experts are
not known yet), of a dense layer its MLP. After the FFN's sum comes the next layer's attention. A tensor is an
address range, so packed INT4, FP8 and NVFP4 layouts need no special case. The planner touches no device; a kernel
takes the array of (pointer, bytes) and, per call, which part of it to load.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

# cp.async.bulk.prefetch.L2 takes 16-byte aligned addresses and sizes.
ALIGNMENT = 16
# One instruction's worth: small enough that several CTAs share a boundary evenly.
CHUNK = 16 << 10

# Thread blocks that ask for the memory beside those of the sum. Measured by benchmark/prefetch.py.
CTAS = 16

# Parts of an attention module in the order they are read; the names are SGLang's.
ATTENTION = (
    "fused_qkv_a_proj_with_mqa",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "qkv_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "q_b_proj",
    "w_kc",
    "kv_b_proj",
    "w_vc",
    "o_proj",
)
DENSE = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
MIXTURE = ("gate", "router", "shared_experts", "shared_expert", "shared_expert_gate", "shared_mlp")


class PrefetchError(ValueError):
    """The model has no layers that the planner knows, or a limit makes no sense."""


@dataclass(frozen=True)
class Range:
    """Bytes [pointer, pointer + bytes) of device memory."""

    pointer: int
    bytes: int

    @property
    def end(self) -> int:
        return self.pointer + self.bytes


@dataclass(frozen=True)
class Boundary:
    """One all-reduce and what is read after it.

    Attributes:
        layer: the layer whose output is summed.
        place: "attention" or "ffn".
        parts: names of the modules or tensors, in reading order.
        ranges: their memory, in the same order, disjoint, not yet cut or limited.
    """

    layer: int
    place: str
    parts: tuple[str, ...]
    ranges: tuple[Range, ...]

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.ranges)


def tensor_range(tensor: torch.Tensor) -> Range:
    """The bytes between a tensor's first and last element, gaps of a strided view included."""
    if tensor.numel() == 0:
        return Range(tensor.data_ptr(), 0)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return Range(tensor.data_ptr(), (last + 1) * tensor.element_size())


def ranges_of(tensors: Iterable[torch.Tensor]) -> list[Range]:
    """Disjoint ranges in first-use order; what an earlier tensor covers is not listed again."""
    out: list[Range] = []
    for tensor in tensors:
        pieces = [tensor_range(tensor)]
        for known in out:
            pieces = [part for piece in pieces for part in _minus(piece, known)]
        for piece in pieces:
            if out and out[-1].end == piece.pointer:
                out[-1] = Range(out[-1].pointer, out[-1].bytes + piece.bytes)
            elif piece.bytes:
                out.append(piece)
    return out


def _minus(piece: Range, known: Range) -> Iterator[Range]:
    if known.end <= piece.pointer or piece.end <= known.pointer:
        yield piece
        return
    if piece.pointer < known.pointer:
        yield Range(piece.pointer, known.pointer - piece.pointer)
    if known.end < piece.end:
        yield Range(known.end, piece.end - known.end)


def tensors_of(part: Any) -> list[torch.Tensor]:
    """Tensors a part reads: itself, or a module's parameters, buffers and plain tensor attributes."""
    if isinstance(part, torch.Tensor):
        return [part]
    if not isinstance(part, torch.nn.Module):
        return []
    found: list[torch.Tensor] = []
    for module in part.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        held += [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        # Large tensors first: scales and zero points are small and hit anyway when time is short.
        found += sorted(held, key=lambda t: -t.numel() * t.element_size())
    return found


def decoder_layers(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The decoder's layers, wherever a wrapper put them (`language_model`, `model`).

    Raises:
        PrefetchError: there is no list of layers with attention and MLP.
    """
    seen: Any = model
    for _ in range(4):
        layers = getattr(seen, "layers", None)
        if layers is not None and len(layers):
            real = [x for x in layers if hasattr(x, "self_attn") and hasattr(x, "mlp")]
            if len(real) == len(layers):
                return list(layers)
        inner = getattr(seen, "language_model", None)
        seen = inner if inner is not None else getattr(seen, "model", None)
        if seen is None:
            break
    raise PrefetchError(f"{type(model).__name__} has no decoder layers with self_attn and mlp")


def _pick(module: Any, names: Sequence[str], prefix: str) -> list[tuple[str, Any]]:
    picked = [(f"{prefix}.{n}", getattr(module, n)) for n in names if hasattr(module, n)]
    return [(name, part) for name, part in picked if tensors_of(part)]


def _attention_parts(layer: Any) -> list[tuple[str, Any]]:
    parts = _pick(layer.self_attn, ATTENTION, "self_attn")
    if any(name.endswith((".w_kc", ".w_vc")) for name, _ in parts):
        # With absorbed MLA weights the projection they were made from is not read while generating.
        parts = [(name, part) for name, part in parts if not name.endswith(".kv_b_proj")]
    return parts


def _ffn_parts(layer: Any) -> list[tuple[str, Any]]:
    if hasattr(layer.mlp, "experts"):
        return _pick(layer.mlp, MIXTURE, "mlp")
    return _pick(layer.mlp, DENSE, "mlp")


def boundaries(model: torch.nn.Module) -> list[Boundary]:
    """Every all-reduce of a decoder in order, with the memory that is read next.

    The last FFN's sum is followed by the final norm and the output head, which is left out: it is far larger than
    L2 and read once.

    Raises:
        PrefetchError: as `decoder_layers`.
    """
    layers = decoder_layers(model)
    out = []
    for index, layer in enumerate(layers):
        out.append(_boundary(index, "attention", _ffn_parts(layer)))
        after = _attention_parts(layers[index + 1]) if index + 1 < len(layers) else []
        out.append(_boundary(index, "ffn", after))
    return out


def _boundary(layer: int, place: str, parts: list[tuple[str, Any]]) -> Boundary:
    tensors = [t for _, part in parts for t in tensors_of(part)]
    return Boundary(layer, place, tuple(n for n, _ in parts), tuple(ranges_of(tensors)))


@dataclass(frozen=True)
class Limits:
    """What a prefetch may take.

    Attributes:
        l2_bytes: size of L2.
        l2_share: part of it that may be filled; activations and the message need the rest.
        bandwidth: bytes per microsecond of device memory (1 GB/s = 1000).
        bandwidth_share: part of it during the wait; the sum's own traffic needs the rest.
        floor_us: start of the wait in which nothing is loaded (launch, first sends).
    """

    l2_bytes: int
    bandwidth: float
    l2_share: float = 0.5
    bandwidth_share: float = 0.8
    floor_us: float = 1.0

    def __post_init__(self) -> None:
        shares = (self.l2_share, self.bandwidth_share)
        if self.l2_bytes <= 0 or self.bandwidth <= 0 or not all(0 < s <= 1 for s in shares):
            raise PrefetchError(f"impossible limits {self}")

    def budget(self, wait_us: float) -> int:
        """Bytes that may be loaded during a wait of this many microseconds."""
        allowed = (wait_us - self.floor_us) * self.bandwidth * self.bandwidth_share
        return max(0, min(int(self.l2_bytes * self.l2_share), int(allowed)))


def chunks_of(ranges: Iterable[Range]) -> list[Range]:
    """Cut ranges into aligned chunks, shrunk inward so that no byte outside a tensor is touched."""
    out = []
    for r in ranges:
        at = -(-r.pointer // ALIGNMENT) * ALIGNMENT
        end = r.end // ALIGNMENT * ALIGNMENT
        while at < end:
            size = min(CHUNK, end - at)
            out.append(Range(at, size))
            at += size
    return out


class PrefetchPlan:
    """Chunks of all boundaries in one array, and how many of each boundary's to load per wait.

    Chunks stand in reading order, so a shorter wait loads a prefix of what a longer one loads.

    Args:
        found: `boundaries(model)`.
        limits: what may be taken.
    """

    def __init__(self, found: Sequence[Boundary], limits: Limits) -> None:
        self.boundaries = tuple(found)
        self.limits = limits
        per_boundary = []
        for boundary in found:
            kept, room = [], int(limits.l2_bytes * limits.l2_share)
            for chunk in chunks_of(boundary.ranges):
                if chunk.bytes > room:
                    break
                kept.append(chunk)
                room -= chunk.bytes
            per_boundary.append(kept)
        self._chunks = [chunk for kept in per_boundary for chunk in kept]
        self._starts = [0, *accumulate(len(kept) for kept in per_boundary)]
        self._sums = [list(accumulate((c.bytes for c in kept), initial=0)) for kept in per_boundary]

    def array(self) -> torch.Tensor:
        """int64 [chunks, 2] on the CPU: pointer, bytes. What the kernel indexes, once on the device."""
        rows = [(c.pointer, c.bytes) for c in self._chunks]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)

    def index(self, layer: int, place: str) -> int:
        """Position of a boundary.

        Raises:
            KeyError: there is no such boundary.
        """
        for i, b in enumerate(self.boundaries):
            if (b.layer, b.place) == (layer, place):
                return i
        raise KeyError(f"no boundary {place} of layer {layer}")

    def window(self, boundary: int, wait_us: float) -> tuple[int, int]:
        """(first, count) rows of `array` to load at a boundary during a wait."""
        budget = self.limits.budget(wait_us)
        return self._starts[boundary], bisect_right(self._sums[boundary], budget) - 1

    def bytes_at(self, boundary: int, wait_us: float) -> int:
        """Bytes that `window` loads."""
        return self._sums[boundary][self.window(boundary, wait_us)[1]]


def plan_for(model: torch.nn.Module, limits: Limits) -> PrefetchPlan:
    """Plan for a loaded model.

    Raises:
        PrefetchError: as `decoder_layers`.
    """
    return PrefetchPlan(boundaries(model), limits)
