"""Whether a collective kernel's sums are right: random data, every rank, against a reference.

Copies can be sound where stores from a kernel are not (a flag seen before its payload), so the probe's last word is
the real kernel on data whose exact sum every rank can compute alone.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.plan import Choice
from sglang_sm120.fabric.verdict import Exchange, Veto

if TYPE_CHECKING:
    from sglang_sm120.comm.communicator import Communicator

ROWS = (1, 4, 7, 32)
ROUNDS = 8
BITS_ROWS = (7, 1, 32)  # an order that depends on who arrives first does not show in every call
FUSED_ROWS = (1, 7)
EPS = 1e-6
NORM_SLACK = (
    2.0**-6
)  # relative; a bf16 has 2**-8, and a kernel may round once more than the reference


def contribution(rank: int, seed: int, rows: int, hidden: int) -> torch.Tensor:
    """What `rank` adds: [rows, hidden] fp32 of small integers, so that every order of summing is exact.

    |x| <= 7, so the sum of 16 ranks is at most 112 and exact in bf16 (8 bits of mantissa).
    """
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randint(-7, 8, (rows, hidden), generator=generator).float()


def check_sums(
    communicator: Communicator,
    backend: str,
    hidden: int,
    rank: int,
    exchange: Exchange,
    device: str = "cpu",
    rounds: int = ROUNDS,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Veto]:
    """Run a backend's sums, plain and fused, on random data on every rank and compare, every way they run; collective.

    Args:
        communicator: a `Communicator`.
        device: where its tensors live.
        rounds: least number of calls.
        dtype: of the tensors; kernels of each dtype are code of their own.

    Returns:
        Vetoes of `backend`, the same on every rank; empty when every element was right on every rank, and all ranks
        held the same bits of sums that round. Where only some ways of a backend that is not `canonical` leave other bits,
        those ways alone.
    """
    problem, bits = "", {}
    try:
        ways = list(communicator.ways(Op.ALL_REDUCE))
        for turn in range(max(rounds, len(ways) * len(ROWS))):
            rows, way = ROWS[turn % len(ROWS)], ways[turn // len(ROWS) % len(ways)]
            communicator.choose(Op.ALL_REDUCE, rows, hidden, *way)
            if not communicator.admits(Op.ALL_REDUCE, rows, hidden, dtype):
                continue
            parts = [contribution(r, turn, rows, hidden) for r in range(communicator.world)]
            x = parts[rank].to(device=device, dtype=dtype)
            got = communicator.all_reduce(x).float().cpu()
            wrong = got != torch.stack(parts).sum(0)
            # A broken kernel may leave elements that were never written; NaN differs from everything.
            if bool(wrong.any()) and not problem:
                row, column = (int(i) for i in wrong.nonzero()[0])
                problem = (
                    f"{int(wrong.sum())} of {wrong.numel()} sums wrong on {rows} rows{_by(way)}, first at row {row} "
                    f"column {column}: {got[row, column].item()}"
                )
        fused = _fused_problem(
            communicator, hidden, rank, device, dtype
        )  # a collective, on every rank
        problem = problem or fused
        bits = {way: _bits(communicator, way, hidden, rank, device, dtype) for way in ways}
        for rows in ROWS:
            communicator.choose(Op.ALL_REDUCE, rows, hidden, "")
    except (
        Exception
    ) as error:  # must reach the other ranks as a text, or they would wait for this one
        problem = f"{type(error).__name__}: {error}"
    told = exchange((problem, bits))
    bad = [(r, text) for r, (text, _) in enumerate(told) if text]
    uneven = [way for way in told[0][1] if len({theirs.get(way) for _, theirs in told}) > 1]
    if not bad and uneven:
        return [
            Veto(
                target=backend if communicator.canonical else _named(backend, way),
                reason=f"the {backend} kernel gives the ranks different bits ({_by(way).strip() or 'as it runs by itself'})",
                remedy="pin another backend with --sm120-backend" if communicator.canonical else "",
            )
            for way in (uneven[:1] if communicator.canonical else uneven)
        ]
    if not bad:
        return []
    shown = "; ".join(f"rank {r}: {text}" for r, text in bad[:4])
    return [
        Veto(
            target=backend,
            reason=f"the {backend} kernel gives wrong sums ({shown})",
            remedy="update the driver; check IOMMU and ACS with `sglang-sm120 doctor`; report this machine",
            ranks=tuple(r for r, _ in bad),
        )
    ]


def _fused_problem(
    communicator: Communicator, hidden: int, rank: int, device: str, dtype: torch.dtype
) -> str:
    """What is wrong with all-reduce + residual + RMSNorm in some way it can run; "" when nothing is."""
    op, problem = Op.ALL_REDUCE_RMSNORM, ""
    weight = torch.linspace(0.5, 1.5, hidden).to(dtype)
    for turn, way in enumerate(communicator.ways(op)):
        for rows in FUSED_ROWS:
            communicator.choose(op, rows, hidden, *way)
            if communicator.admits(op, rows, hidden, dtype):
                parts = [contribution(r, turn, rows, hidden) for r in range(communicator.world)]
                residual = contribution(communicator.world, turn, rows, hidden)
                x, old, scale = (t.to(device, dtype) for t in (parts[rank], residual, weight))
                out = communicator.all_reduce_rmsnorm(x, old, scale, EPS)
                normed, kept = (t.float().cpu() for t in out)
                exact = torch.stack(parts).sum(0) + residual
                want = torch.nn.functional.rms_norm(exact, (hidden,), weight.float(), EPS)
                wrong = int((kept != exact).sum())
                # Written so that a NaN, of an element that was never written, counts.
                off = int((~((normed - want).abs() <= NORM_SLACK * want.abs())).sum())
                if not problem and (wrong or off):
                    problem = (
                        f"{wrong} of {exact.numel()} residuals and {off} normed values wrong on {rows} rows"
                        f"{_by(way)}, fused"
                    )
            communicator.choose(op, rows, hidden, "")
    return problem


def _named(backend: str, way: tuple[str, int]) -> str:
    schedule, ctas = way
    return Choice(backend=backend, schedule=schedule, ctas=ctas).name


def _by(way: tuple[str, int]) -> str:
    schedule, ctas = way
    return f" by {schedule}" + (f" on {ctas} CTAs" if ctas else "") if schedule else ""


def _bits(
    communicator: Communicator,
    way: tuple[str, int],
    hidden: int,
    rank: int,
    device: str,
    dtype: torch.dtype,
) -> str:
    """Digest of a sum whose rounding depends on its order: all ranks must hold the same bits, right or not."""
    seen = hashlib.sha256()
    generator = torch.Generator().manual_seed(rank)
    for rows in BITS_ROWS:
        communicator.choose(Op.ALL_REDUCE, rows, hidden, *way)
        if communicator.admits(Op.ALL_REDUCE, rows, hidden, dtype):
            x = torch.randn(rows, hidden, generator=generator).to(device, dtype)
            seen.update(communicator.all_reduce(x).cpu().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]
