"""Published latency tables, and how far the simulator is from them.

The tables and the machines they were measured on are data files beside this module. Every series (one machine, one
implementation) is cut in two halves by position before anything is fitted: the 1st, 3rd, 5th ... row by size may set
constants, the 2nd, 4th ... may not and are only compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from sglang_sm120.fabric import simulate
from sglang_sm120.fabric.machine import Machine, load
from sglang_sm120.fabric.rivals import CONSTANTS, Constants

FOLDER = Path(__file__).with_name("published")


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published curve.

    Attributes:
        id: short name; machine: name of the machine file; method: key of `simulate.methods()`.
        source: public address; note: why this method stands for it.
        ranks: which GPUs took part; all when empty.
        rows: (bytes per rank, microseconds), ascending.
        engine_gbps: what this implementation moved per GPU in this run (kernel shape, NCCL channels: not published),
            set on the fitting half; 0 where the machine's own figures and `Constants` are used.
        reason: why rows of this series may be far off, for the list of outliers.
    """

    id: str
    machine: str
    method: str
    source: str
    rows: tuple[tuple[int, float], ...]
    ranks: tuple[int, ...] = ()
    note: str = ""
    engine_gbps: float = 0.0
    reason: str = ""


class Row(msgspec.Struct, frozen=True):
    """One published figure beside the simulator's; `fitted` tells whether it may set constants."""

    series: Series
    nbytes: int
    published_us: float
    simulated_us: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error, simulated / published - 1."""
        return self.simulated_us / self.published_us - 1.0


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    series: tuple[Series, ...]


@cache
def published_machine(name: str) -> Machine:
    """The machine `name` of the published tables."""
    return load(FOLDER / f"{name}.toml")


def machine_names() -> tuple[str, ...]:
    """Names of the machines that come with the tables."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.toml") if p.stem != "tables"))


@cache
def series() -> tuple[Series, ...]:
    """All published curves."""
    text = (FOLDER / "tables.toml").read_bytes()
    return msgspec.toml.decode(text, type=_Tables).series


def predict(one: Series, nbytes: int, constants: Constants = CONSTANTS) -> float:
    """The simulator's microseconds for a message of `nbytes` bytes under the conditions of a published curve."""
    machine = published_machine(one.machine)
    if one.engine_gbps and one.method.startswith("nccl"):
        constants = msgspec.structs.replace(
            constants, ll_gbps=one.engine_gbps, simple_gbps=one.engine_gbps
        )
    elif one.engine_gbps:
        machine = _limited(one.machine, one.engine_gbps)
    return simulate.rival(machine, one.method, nbytes, one.ranks or None, constants).total_us


@cache
def _limited(name: str, gbps: float) -> Machine:
    machine = published_machine(name)
    gpus = tuple(
        msgspec.structs.replace(g, store_bandwidth=gbps, load_bandwidth=gbps) for g in machine.gpus
    )
    return msgspec.structs.replace(machine, gpus=gpus)


def compare(constants: Constants = CONSTANTS, curves: Sequence[Series] | None = None) -> list[Row]:
    """Every published row beside the simulator's figure."""
    return [
        Row(one, nbytes, us, predict(one, nbytes, constants), fitted=at % 2 == 0)
        for one in (series() if curves is None else curves)
        for at, (nbytes, us) in enumerate(one.rows)
    ]


def median_error(rows: Sequence[Row]) -> float:
    """Median of the absolute relative errors."""
    return statistics.median(abs(r.error) for r in rows)


def mean_log_error(rows: Sequence[Row]) -> float:
    """Mean absolute logarithm of simulated over published: the quantity that the fit makes small."""
    return statistics.fmean(abs(math.log(r.simulated_us / r.published_us)) for r in rows)
