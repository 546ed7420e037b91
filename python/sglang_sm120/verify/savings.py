"""What each part of the plugin would save on a profiled pass. Estimates, each with its basis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_sm120.comm.communicator import Op
from sglang_sm120.comm.plan import Plan
from sglang_sm120.verify.profile import KindReport, Profile

# One fused all-reduce + residual + RMSNorm over 8 SM120 GPUs behind PCIe switches, us = A + B * KiB:
# 12.3 / 21.1 / 33.7 us for 1 / 4 / 8 rows of 12 KiB, published with the b12x kernels.
PUBLISHED_FUSED = (9.2, 0.255)
# A sum this short is launch and first byte; nothing can be loaded under it.
FLOOR_US = 4.0
# Share of a wait that a prefetch may use, and of the compute after it that is weight streaming.
PREFETCH_SHARE = 0.5


@dataclass(frozen=True)
class Saving:
    """One line of the report.

    Attributes:
        part: of the plugin.
        us: saved per verify pass, microseconds; 0.0 when it saves no time, None when unknown.
        basis: where the figure comes from.
    """

    part: str
    us: float | None
    basis: str


@dataclass(frozen=True)
class Economy:
    """Whether speculation pays on the profiled machine.

    Attributes:
        iteration_us: draft + verify + draft-extend, device time between passes included.
        plain_us: one plain decode pass.
        accept_length: tokens per request and verify pass.
    """

    iteration_us: float
    plain_us: float
    accept_length: float | None

    @property
    def break_even(self) -> float:
        """Accept length at which speculation neither gains nor loses."""
        return self.iteration_us / self.plain_us


def fused_time(plan: Plan | None) -> tuple[Callable[[int, int], float | None], str]:
    """A function (rows, bytes) -> microseconds of one fused all-reduce, and its basis."""
    if plan is not None:

        def planned(rows: int, size: int) -> float | None:
            return plan.lookup(Op.ALL_REDUCE_RMSNORM, rows).us or None

        return planned, f"this machine's plan {plan.digest()}"
    base, slope = PUBLISHED_FUSED

    def published(rows: int, size: int) -> float | None:
        return base + slope * size / 1024 if size else None

    return published, f"published kernels, 8 GPUs: {base} + {slope} us per KiB"


def economy(
    profile: Profile, accept_length: float | None = None, plain_ms: float | None = None
) -> Economy | None:
    """Compare a speculative iteration with a plain pass; None without a verify and a plain pass.

    Args:
        plain_ms: length of a plain decode pass, when the trace has none.
    """
    kinds = profile.main
    verify = kinds.get("VERIFY")
    plain = kinds.get("DECODE")
    plain_us = plain_ms * 1e3 if plain_ms else plain.mean("span") if plain else None
    if verify is None or plain_us is None:
        return None
    draft = kinds.get("DRAFT")
    drafting = 0.0
    if draft is not None:
        drafting = draft.mean("span") * len(draft.passes) / len(verify.passes)
    steps = 1 + (len(draft.passes) / len(verify.passes) if draft else 0)
    return Economy(verify.mean("span") + drafting + steps * profile.gap_us, plain_us, accept_length)


def savings(
    kind: KindReport,
    *,
    rows: int,
    hidden: int,
    itemsize: int = 2,
    plan: Plan | None = None,
    economy_of: Economy | None = None,
) -> list[Saving]:
    """What each part would save per pass of a kind.

    Args:
        rows: rows of the pass (requests x (draft tokens + 1)); sizes that the trace has go first.
        hidden: elements per row; 0 when unknown.
        itemsize: bytes per element.
        plan: this machine's plan, for measured times of our kernels.
        economy_of: for the draft-length policy.
    """
    sums = kind.typical.segments
    fused, basis = fused_time(plan)
    default_size = rows * hidden * itemsize
    gain, norm_us, left, known = 0.0, 0.0, 0.0, 0
    for segment in sums:
        now = fused(rows, segment.bytes or default_size)
        if now is None:
            continue
        known += 1
        gain += max(0.0, segment.us - now)
        left += min(segment.us, now)
        norm_us += segment.norm_us
    out = []
    if not sums:
        out.append(Saving("fused all-reduce", 0.0, "no all-reduce in this pass"))
    elif not known:
        out.append(
            Saving("fused all-reduce", None, "message size unknown: give --rows and --hidden")
        )
    else:
        ours = sum(s.who == "sm120" for s in sums)
        note = f"; {ours} of {len(sums)} are ours already" if ours else ""
        out.append(Saving("fused all-reduce", gain, f"{known} sums, {basis}{note}"))
        out.append(
            Saving("RMSNorm inside it", norm_us, "norm kernels that follow a sum in the trace")
        )
        out.append(_prefetch(kind, left, known))
    out.append(_policy(economy_of))
    out.append(Saving("compact NCCL", 0.0, "saves memory, not time"))
    return out


def _prefetch(kind: KindReport, left: float, known: int) -> Saving:
    segments = kind.typical.segments
    waits = max(0.0, left - known * FLOOR_US)
    after = [s.before.compute for s in segments[1:]] + [kind.typical.tail.compute]
    room = sum(after) * PREFETCH_SHARE
    return Saving(
        "weight prefetch",
        min(waits * PREFETCH_SHARE, room),
        f"at most: {PREFETCH_SHARE:.0%} of the remaining wait and of the compute behind it",
    )


def _policy(found: Economy | None) -> Saving:
    part = "draft-length policy"
    if found is None:
        return Saving(part, None, "needs a plain pass: profile decode too, or give --plain-ms")
    text = f"an iteration costs {found.break_even:.2f} plain passes, the break-even accept length"
    if found.accept_length is None:
        return Saving(part, None, text + "; give --accept-length")
    excess = found.iteration_us - found.accept_length * found.plain_us
    if excess > 0:
        return Saving(part, excess, f"{text}; at {found.accept_length:.2f} it stops drafting")
    return Saving(part, 0.0, f"{text}; at {found.accept_length:.2f} drafting pays")
