"""The simulator against published tables: the halves, the errors, the reasons of outliers."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console
from rich.table import Table
from sglang_sm120.fabric import simulate_published as published


@pytest.fixture(scope="module")
def rows() -> list[published.Row]:
    return published.compare()


def test_enough_public_rows_and_machines(rows: list[published.Row]) -> None:
    checked = [r for r in rows if not r.fitted]
    assert len(checked) >= 25
    assert len({r.series.machine for r in checked}) >= 6
    assert all(r.series.source.startswith("https://") for r in rows)


def test_halves_alternate_by_size() -> None:
    for one in published.series():
        sizes = [nbytes for nbytes, _ in one.rows]
        assert sizes == sorted(sizes), one.id
        halves = [r.fitted for r in published.compare(curves=[one])]
        assert halves == [at % 2 == 0 for at in range(len(sizes))]


def test_checked_half_within_a_quarter(rows: list[published.Row]) -> None:
    checked = [r for r in rows if not r.fitted]
    table = Table(title="Simulated against published all-reduce latency (us), checked half")
    for column in ("series", "bytes", "published", "simulated", "error"):
        table.add_column(column)
    for r in checked:
        table.add_row(
            r.series.id,
            str(r.nbytes),
            f"{r.published_us:.1f}",
            f"{r.simulated_us:.1f}",
            f"{r.error:+.0%}",
        )
    console = Console(width=110)
    console.print(table)
    median = published.median_error(checked)
    console.print(f"checked half: {len(checked)} rows, median absolute error {median:.1%}")
    assert median <= 0.25
    # A model that answers one number for everything must not pass.
    middle = sorted(r.published_us for r in checked)[len(checked) // 2]
    naive = sorted(abs(middle / r.published_us - 1) for r in checked)[len(checked) // 2]
    assert median < naive / 3


def test_every_outlier_has_a_reason(rows: list[published.Row]) -> None:
    outliers = [r for r in rows if not r.fitted and abs(r.error) > 0.5]
    for r in outliers:
        print(f"{r.series.id} {r.nbytes} B: {r.error:+.0%}: {r.series.reason}")
    unexplained = [(r.series.id, r.nbytes) for r in outliers if not r.series.reason]
    assert unexplained == []
    assert len(outliers) <= len([r for r in rows if not r.fitted]) // 5


def test_collapse_is_predicted_where_it_was_seen(rows: list[published.Row]) -> None:
    """The same kernel and size: 12 us on four GPUs of the machine, hundreds on eight."""
    four = next(r for r in rows if r.series.id == "ASUS 4 one-shot" and r.nbytes == 65536)
    eight = next(r for r in rows if r.series.id == "ASUS 8 one-shot" and r.nbytes == 65536)
    assert eight.published_us / four.published_us > 40
    assert eight.simulated_us / four.simulated_us > 20


def test_one_set_of_constants_for_all_machines_is_still_within_a_quarter() -> None:
    """Without the rate that ten series have of their own: nothing machine-specific is fitted at all."""
    bare = [msgspec.structs.replace(s, engine_gbps=0.0) for s in published.series()]
    checked = [r for r in published.compare(curves=bare) if not r.fitted]
    assert published.median_error(checked) <= 0.25
