"""The probe over the software fabric: every fault of the field is found, bounded, and named."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.fabric import islands as isl
from sglang_sm120.fabric import machine, patterns, probe
from sglang_sm120.fabric.driver import compare, pattern
from sglang_sm120.fabric.flows import shares
from sglang_sm120.fabric.machine import Collapse, Fault, Machine
from sglang_sm120.fabric.report import ProbeReport, collapse_ratio, forbidden, vetoes
from sglang_sm120.fabric.software import (
    SoftwareDriver,
    SoftwareFabric,
    ThreadExchange,
    probe_machine,
    run_ranks,
)
from sglang_sm120.fabric.verdict import Verdict

FIXTURES = Path(__file__).parents[1] / "fixtures" / "machines"
# Small messages keep the bytes that Python threads move low; the sizes still straddle 64 KiB.
QUICK = probe.Effort(
    arrival_s=0.5, integrity_bytes=(4 << 10, 64 << 10, (128 << 10) + 24), stream_bytes=64 << 10
)


def box(name: str) -> Machine:
    return machine.load(FIXTURES / name / "fabric.toml")


def with_faults(name: str, *faults: Fault) -> Machine:
    return msgspec.structs.replace(box(name), faults=faults)


def verdict_of(report: ProbeReport) -> Verdict:
    verdict = Verdict()
    verdict.add(vetoes(report))
    return verdict


def test_c01_lost_stores_cost_less_than_five_seconds_and_name_pair_and_cause() -> None:
    broken = with_faults(
        "workstation-4",
        Fault(kind="drop", source="g0", target="g1"),
        Fault(kind="drop", source="g1", target="g0"),
    )
    begin = time.monotonic()
    report = probe_machine(broken)
    assert time.monotonic() - begin < 5.0
    assert {(f.source, f.target) for f in report.failures} <= {(0, 1), (1, 0)}
    assert report.failures[0].kind == "lost"
    verdict = verdict_of(report)
    assert not verdict.allows("native") and verdict.allows("nccl")
    why = verdict.why("native")
    assert "GPU 0 -> GPU 1" in why and "IOMMU" in why and "ACS" in why


def test_c01_nothing_at_all_arrives() -> None:
    begin = time.monotonic()
    report = probe_machine(with_faults("two-switches", Fault(kind="drop")), QUICK)
    assert time.monotonic() - begin < 5.0
    assert len(report.failures) == 8 and not report.latency_us


def test_c02_one_flipped_byte_above_64_kib_in_one_direction_is_found() -> None:
    report = probe_machine(box("one-bad-direction"), QUICK)
    (failure,) = report.failures
    assert (failure.kind, failure.source, failure.target) == ("corrupt", 1, 0)
    assert "first at offset 4095" in failure.detail and "CRC" in failure.detail
    assert not verdict_of(report).allows("native")


def test_c02_the_same_machine_without_the_fault_is_sound() -> None:
    report = probe_machine(with_faults("one-bad-direction"), QUICK)
    assert report.sound and verdict_of(report).allows("native")


def test_c04_ipc_error_on_one_rank_only() -> None:
    broken = with_faults("workstation-4", Fault(kind="ipc", source="g3"))
    fabric, meet = SoftwareFabric(broken), ThreadExchange(4)
    drivers = [fabric.driver(r) for r in range(4)]
    reports = run_ranks(4, lambda r: probe.run(drivers[r], meet.of(r), QUICK))
    assert all(r == reports[0] for r in reports)
    assert {f.source for f in reports[0].failures} == {3}
    assert all(not d.opened for d in drivers), "opened handles must be closed"
    why = verdict_of(reports[0]).why("native")
    assert "101" in why and "rank" in why


def test_c24_collapse_is_shown_and_its_schedules_are_forbidden() -> None:
    report = probe_machine(box("dual-socket-virtual-switches"), QUICK)
    by_switch = ((0, 1), (2, 3), (4, 5), (6, 7))
    by_socket = ((0, 1, 2, 3), (4, 5, 6, 7))
    flat = report.pattern("all-to-all", isl.flat(8))
    lanes = report.pattern("lanes", by_switch)
    assert flat is not None and flat.collapsed and flat.ratio < 0.2
    assert lanes is not None and lanes.collapsed
    assert sum(
        g for (a, b), g in zip(lanes.flows, lanes.gbps, strict=True) if a in (0, 1)
    ) == pytest.approx(2.7)
    assert set(forbidden(report, by_switch)) == {
        "one_shot",
        "two_shot",
        "island_two_hop",
        "island_dataflow",
    }
    assert set(forbidden(report, by_socket)) == {"one_shot", "two_shot", "island_two_hop"}


@pytest.mark.parametrize(
    "name", ["two-switches", "dual-socket-direct", "single-switch", "workstation-4"]
)
def test_c24_healthy_machines_have_no_collapse(name: str) -> None:
    report = probe_machine(box(name), QUICK, noise=0.02)
    assert report.sound and report.patterns
    assert not [p for p in report.patterns if p.collapsed]


def test_stores_that_collapse_at_the_gpu_are_seen_without_islands() -> None:
    rule = Collapse(bandwidth=2.6, scope="gpu", min_sources=1, min_roots=1, min_flows=2)
    sick = msgspec.structs.replace(box("single-switch"), collapse=(rule,))
    report = probe_machine(sick, QUICK)
    assert set(forbidden(report, isl.flat(8))) >= {"one_shot", "two_shot"}


def test_c25_staged_p2p_is_known_by_its_latency_and_stops_early() -> None:
    begin = time.monotonic()
    report = probe_machine(box("staged-p2p"), QUICK)
    assert time.monotonic() - begin < 5.0
    assert report.staged and report.median_latency_us() > 5
    assert not report.store_gbps, "bandwidth and integrity are not measured at host speed"
    why = verdict_of(report).why("native")
    assert "options nvidia" in why and "ForceP2P" in why and "7.0 us" in why


def test_no_peer_access_declines_without_measuring() -> None:
    report = probe_machine(box("geforce-no-p2p"), QUICK)
    assert {f.kind for f in report.failures} == {"open"}
    assert verdict_of(report).allows("mailbox") and not verdict_of(report).allows("native")


@pytest.mark.parametrize(
    ("name", "islands"),
    [
        ("two-switches", "0,1,2,3;4,5,6,7"),
        ("dual-socket-direct", "0,1,2,3;4,5,6,7"),
        ("six-interleaved", "0,2,4;1,3,5"),
    ],
)
def test_islands_come_from_measurements_not_from_numbers(name: str, islands: str) -> None:
    report = probe_machine(box(name), QUICK, noise=0.03, seed=7)
    assert islands in [isl.text(p) for p in isl.partitions(report.latency_us)]


def test_sixteen_gpus_are_probed_with_at_most_eight_peers_at_once() -> None:
    tiny = msgspec.structs.replace(QUICK, integrity_bytes=(4 << 10,), step_s=10.0, arrival_s=10.0)
    fabric, meet = (
        SoftwareFabric(box("sixteen-four-islands"), capacity=64 << 10),
        ThreadExchange(16),
    )
    widest = 0

    class Watched(SoftwareDriver):
        def push(self, targets, nbytes, seed, timeout_s):
            nonlocal widest
            widest = max(widest, len(targets))
            super().push(targets, nbytes, seed, timeout_s)

    report = run_ranks(16, lambda r: probe.run(Watched(fabric, r), meet.of(r), tiny))[0]
    assert report.sound and widest == isl.MAX_PEERS
    assert report.pattern("all-to-all", isl.flat(16)) is None
    assert isl.partitions(report.latency_us)[-1] == tuple(
        tuple(range(i, i + 4)) for i in (0, 4, 8, 12)
    )


def test_fast_mode_stays_within_three_seconds_for_eight_ranks() -> None:
    # The better of two: other work on the machine is not the probe's.
    reports = [probe_machine(box("two-switches"), QUICK) for _ in range(2)]
    assert all(r.sound for r in reports)
    assert min(sum(r.steps.values()) for r in reports) < 3.0


def test_a_driver_call_that_hangs_is_cut_off_and_reported_on_all_ranks(monkeypatch) -> None:
    monkeypatch.setattr(probe, "GRACE_S", 0.2)
    fabric, meet = SoftwareFabric(box("three-gpus")), ThreadExchange(3)
    release = threading.Event()

    class Hanging(SoftwareDriver):
        def collect(self, source, nbytes, seed, timeout_s):
            if self.rank == 1:
                release.wait(30)
            return super().collect(source, nbytes, seed, timeout_s)

    begin = time.monotonic()
    reports = run_ranks(3, lambda r: probe.run(Hanging(fabric, r), meet.of(r), QUICK))
    assert time.monotonic() - begin < 5.0
    release.set()
    assert any(f.kind == "stuck" and f.source == 1 for f in reports[0].failures)
    assert all(r.failures == reports[0].failures for r in reports)


def test_an_exception_on_one_rank_becomes_a_failure_on_all() -> None:
    fabric, meet = SoftwareFabric(box("three-gpus")), ThreadExchange(3)

    class Failing(SoftwareDriver):
        def push(self, targets, nbytes, seed, timeout_s):
            if self.rank == 2:
                raise RuntimeError("CUDA error 700")
            super().push(targets, nbytes, seed, timeout_s)

    reports = run_ranks(3, lambda r: probe.run(Failing(fabric, r), meet.of(r), QUICK))
    assert all(r.failures == reports[0].failures for r in reports)
    assert any("CUDA error 700" in f.detail for f in reports[0].failures)


def test_full_mode_measures_loads_too() -> None:
    effort = msgspec.structs.replace(QUICK, loads=True)
    report = probe_machine(box("workstation-4"), effort)
    assert report.load_gbps[0][1] == pytest.approx(51.0)
    assert report.store_gbps[0][1] == pytest.approx(52.6)


def test_reports_survive_json() -> None:
    report = probe_machine(box("three-gpus"), QUICK)
    again = msgspec.json.decode(msgspec.json.encode(report), type=ProbeReport)
    assert again == report


@given(st.integers(1, 5000), st.integers(0, 15), st.integers(0, 15), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_the_pattern_depends_on_address_edge_and_seed(n: int, a: int, b: int, seed: int) -> None:
    data = pattern(a, b, n, seed)
    assert data.dtype == np.uint8 and data.size == n
    assert compare(data, a, b, seed).wrong == 0
    if n >= 64:
        assert compare(pattern(b, a + 16, n, seed), a, b, seed).wrong > n // 2
        assert compare(pattern(a, b, n, seed + 1), a, b, seed).wrong > n // 2
        moved = np.roll(data, 8)
        assert compare(moved, a, b, seed).wrong > n // 2


@given(st.integers(1, 4000), st.data())
@settings(max_examples=40, deadline=None)
def test_any_single_flipped_bit_is_found(n: int, data: st.DataObject) -> None:
    sent = pattern(0, 1, n, 5).copy()
    at = data.draw(st.integers(0, n - 1))
    sent[at] ^= 1 << data.draw(st.integers(0, 7))
    found = compare(sent, 0, 1, 5)
    assert (found.wrong, found.first_wrong) == (1, at)


@given(st.integers(2, 17))
def test_a_tournament_lets_every_pair_meet_once(world: int) -> None:
    rounds = patterns.tournament(world)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    assert all(len({r for p in pairs for r in p}) == 2 * len(pairs) for pairs in rounds)


@given(st.integers(2, 16))
def test_crowds_send_every_shift_once_with_at_most_eight_peers(world: int) -> None:
    crowds = patterns.crowds(world)
    assert [s for crowd in crowds for s in crowd] == list(range(1, world))
    assert all(len(crowd) <= isl.MAX_PEERS for crowd in crowds)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_peers_are_mutual_and_cover_every_tile_owner(sizes: list[int]) -> None:
    ranks = iter(range(sum(sizes)))
    partition = tuple(tuple(next(ranks) for _ in range(n)) for n in sizes)
    for island in partition:
        for rank in island:
            mine = isl.peers(partition, rank)
            assert set(island) - {rank} <= mine
            assert all(rank in isl.peers(partition, p) for p in mine)
            for other in partition:
                if other is not island:
                    # Owners of tile t must know each other, for every t.
                    lane = island.index(rank)
                    for t in range(len(island) * len(other)):
                        if t % len(island) == lane:
                            assert other[t % len(other)] in mine


def test_hints_are_taken_only_when_they_name_every_rank_once() -> None:
    found = (isl.flat(4),)
    assert isl.with_hints(found, [((0, 1), (2, 3))]) == (isl.flat(4), ((0, 1), (2, 3)))
    assert isl.with_hints(found, [((0, 1),), ((0, 1), (1, 2, 3)), ((3, 2, 1, 0),)]) == found


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_ports_of_one_switch_are_not_taken_for_islands(spread: float) -> None:
    latency = [
        [0.0 if a == b else 0.68 + spread * ((a + b) % 3) for b in range(8)] for a in range(8)
    ]
    assert isl.partitions(latency) == (isl.flat(8),)


def test_collapse_ratio_counts_only_what_leaves_the_group() -> None:
    solo = [[50.0] * 4 for _ in range(4)]
    flows = [(0, 1), (0, 2), (1, 3), (2, 3)]
    gbps = [40.0, 1.0, 1.5, 30.0]
    assert collapse_ratio(flows, gbps, solo, [(0, 1), (2, 3)]) == pytest.approx(0.05)
    assert collapse_ratio([(0, 1)], [50.0], solo, [(0, 1), (2, 3)]) == 1.0


def test_shares_match_published_aggregates() -> None:
    """Two-switch machine: 4 pairs over one uplink get 56.4 in all, a 4+4 exchange 14 each (community page)."""
    two = box("two-switches")
    across = shares(two, [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert sum(across) == pytest.approx(56.4)
    assert across == pytest.approx([14.1] * 4)
    inside = shares(two, [(0, 1), (2, 3)])
    assert inside == pytest.approx([52.6, 52.6])
    one_uplink_load = shares(two, [(0, 4), (1, 5)], "load")
    assert sum(one_uplink_load) == pytest.approx(56.4)


def test_shares_are_conserving_on_every_fixture() -> None:
    for path in sorted(FIXTURES.iterdir()):
        m = machine.load(path / "fabric.toml")
        flows = [(a, b) for a in range(m.world) for b in range(m.world) if a != b]
        got = shares(m, flows)
        assert all(g > 0 for g in got)
        for gpu in range(m.world):
            sent = sum(g for (a, _), g in zip(flows, got, strict=True) if a == gpu)
            assert sent <= m.gpus[gpu].store_bandwidth * (1 + 1e-9)
