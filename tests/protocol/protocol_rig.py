"""Worlds of ranks in one process, driven from tests; see csrc/host/world.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang_sm120.comm._lib import host_library
from sglang_sm120.comm.schedule import SCHEDULES, islands_text

CODECS = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPS = ("all_reduce", "all_reduce_rmsnorm", "all_reduce_rmsnorm_fp8")
PHASES = ("idle", "push", "reduce", "cross", "gather", "record")

# Every shape of partition at small worlds, and the ones real machines have.
LAYOUTS: dict[int, list[str]] = {
    2: ["", "0;1"],
    3: ["", "0,1;2", "0;1;2"],
    4: ["", "0,1;2,3", "0,2;1,3", "0;1,2,3"],
    5: ["", "0,1;2,3,4"],
    6: ["", "0-2;3-5", "0,1;2,3;4,5"],
    7: ["", "0-2;3-6"],
    8: ["", "0-3;4-7", "0,2,4,6;1,3,5,7", "0,1;2,3;4,5;6,7", "0-2;3-7"],
    9: ["0-3;4-8"],
    10: ["0-4;5-9"],
    11: ["0-3;4-7;8-10"],
    12: ["0-3;4-7;8-11"],
    13: ["0-6;7-12"],
    14: ["0-6;7-13"],
    15: ["0-4;5-9;10-14"],
    16: ["0-7;8-15", "0-3;4-7;8-11;12-15"],
}

ISLAND_SCHEDULES = tuple(s for s in SCHEDULES if s not in ("one_shot", "two_shot"))


def schedules_for(world: int) -> tuple[str, ...]:
    """Above 8 ranks only island schedules are offered (a CUDA device maps at most 8 peers)."""
    return SCHEDULES if world <= 8 else ISLAND_SCHEDULES


def islands_of(world: int, layout: str) -> list[list[int]]:
    """The partition as lists, in canonical order."""
    if not layout:
        return [list(range(world))]
    islands = []
    for group in layout.split(";"):
        ranks: list[int] = []
        for piece in group.split(","):
            low, _, high = piece.partition("-")
            ranks += range(int(low), int(high or low) + 1)
        islands.append(sorted(ranks))
    return sorted(islands)


@dataclass
class Outputs:
    """What every rank got: tensors are [world, rows, hidden], scales [world, rows]."""

    out: torch.Tensor
    residual_out: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


@dataclass
class World:
    """Ranks of one process. `settings` are the integers of `world_config` in csrc/ffi/host_world.cpp."""

    world: int
    layout: str = ""
    settings: dict[str, int] = field(default_factory=dict)
    faults: Sequence[tuple[int, int, int, int]] = ()

    def __post_init__(self) -> None:
        self._lib = host_library()
        self._keep: list[Any] = []
        self._handle = self._lib.world_new(
            {"world": self.world, **self.settings},
            islands_text(self.layout),
            [list(fault) for fault in self.faults],
        )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.world_free(self._handle)

    def add(
        self,
        x: torch.Tensor,
        schedule: str,
        *,
        op: str = "all_reduce",
        wire: str = "lossless",
        fp32_partials: bool = False,
        ctas: int = 1,
        rows: Sequence[int] | None = None,
        residual: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        gemma: bool = False,
    ) -> Outputs:
        """Append a call; `rows[r]` lets rank r call with fewer rows than the others."""
        none = torch.empty(0)
        norm = op != "all_reduce"
        world, most_rows, hidden = x.shape
        x = x.contiguous()
        outputs = Outputs(
            torch.zeros_like(x),
            torch.zeros_like(x) if norm else none,
            torch.zeros(x.shape, dtype=torch.uint8) if op == OPS[2] else none,
            torch.zeros(world, most_rows) if op == OPS[2] else none,
        )
        name = {v: k for k, v in DTYPES.items()}[x.dtype]
        codec = CODECS["int8" if wire == "int8" else name]
        settings = {
            "schedule": SCHEDULES.index(schedule),
            "codec": codec,
            "partial": CODECS["fp32"] if fp32_partials else codec,
            "ctas": ctas,
            "op": OPS.index(op),
            "gemma": int(gemma),
        }
        tensors = (
            x,
            none if residual is None else residual.contiguous(),
            none if weight is None else weight.contiguous(),
            outputs.out,
            outputs.residual_out,
            outputs.codes,
            outputs.scales,
        )
        self._keep.append(tensors)
        self._lib.world_add(
            self._handle,
            settings,
            islands_text(self.layout),
            list(rows if rows is not None else [most_rows] * world),
            eps,
            *tensors,
        )
        return outputs

    def run(self, threads: bool = False) -> list[str]:
        """Run what was added; the failure text of each rank, empty where all went well."""
        failures = [str(text) for text in self._lib.world_run(self._handle, threads)]
        self._keep.clear()
        return failures

    def edge_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes of tiles each edge carried so far."""
        flat = list(self._lib.world_edge_bytes(self._handle))
        return {
            (s, t): flat[s * self.world + t]
            for s in range(self.world)
            for t in range(self.world)
            if flat[s * self.world + t]
        }

    def now_ns(self) -> int:
        """The virtual clock."""
        return int(self._lib.world_now_ns(self._handle))

    def flight(self, rank: int) -> dict[str, Any]:
        """A rank's flight record."""
        raw = list(self._lib.world_flight(self._handle, rank))
        keys = ("valid", "rank", "phase", "tile", "source", "call", "waited_ns")
        record: dict[str, Any] = dict(zip(keys, raw))
        record["phase"] = PHASES[record["phase"]]
        return record


SPECIALS = {
    "fp32": [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF]
    + [0x7F800000, 0xFF800000, 0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0x3F800000],
    "bf16": [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0xFFFF]
    + [0x7F81, 0xFFC0, 0x7FFF, 0x3F80],
    "fp16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0xFFFF]
    + [0x7C01, 0xFE00, 0x7FFF, 0x3C00],
}


def random_inputs(
    world: int, rows: int, hidden: int, dtype: str, seed: int, special: bool = False
) -> torch.Tensor:
    """[world, rows, hidden]; with `special`, a third of the elements are extreme bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(world, rows, hidden, generator=generator).to(DTYPES[dtype])
    if not special:
        return x
    width = torch.int32 if dtype == "fp32" else torch.int16
    modulus = 1 << (32 if dtype == "fp32" else 16)
    patterns = torch.tensor(
        [p - modulus if p >= modulus // 2 else p for p in SPECIALS[dtype]], dtype=width
    )
    pick = torch.randint(len(patterns), x.shape, generator=generator)
    where = torch.rand(x.shape, generator=generator) < 1 / 3
    return torch.where(where, patterns[pick], x.view(width)).view(x.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bit patterns, so that NaNs and the signs of zeros count."""
    width = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    return torch.equal(a.contiguous().view(width), b.contiguous().view(width))
