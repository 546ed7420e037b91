"""The event engine: shares, queues, latency, collapse, determinism, speed; and the rivals' schedules."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from sglang_sm120.comm.schedule import describe, moves
from sglang_sm120.fabric import machine as described
from sglang_sm120.fabric import rivals, simulate, simulate_machine, simulate_own
from sglang_sm120.fabric.flows import shares
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate_engine import Network, SimulationError, Transfer, run
from sglang_sm120.fabric.simulate_published import published_machine
from sglang_sm120.fabric.source import Saved
from sglang_sm120.fabric.topology import discover

FIXTURES = Path(__file__).parents[1] / "fixtures" / "machines"


def tree(
    switches: int,
    per_switch: int,
    port: float = 50.0,
    uplink: float = 50.0,
    collapse: str = "",
    store: float = 1000.0,
) -> Machine:
    """`switches` switches on roots of their own with `per_switch` GPUs each; 0.3 us per port, 0.2 per uplink."""
    text = [
        'name = "tree"',
        'title = "tree"',
        "[links]",
        f"port = {{ bandwidth = {port}, latency_us = 0.3 }}",
        f"up = {{ bandwidth = {uplink}, latency_us = 0.2 }}",
        "die = { bandwidth = 1000.0 }",
        '[[sockets]]\nid = "s"',
    ]
    for s in range(switches):
        text.append(f'[[roots]]\nid = "r{s}"\nparent = "s"\nlink = "die"')
        text.append(f'[[switches]]\nid = "sw{s}"\nparent = "r{s}"\nlink = "up"')
    for g in range(switches * per_switch):
        text.append(
            f'[[gpus]]\nid = "g{g}"\nparent = "sw{g // per_switch}"\nlink = "port"\n'
            f"store_bandwidth = {store}\nload_bandwidth = 40.0"
        )
    return described.parse("\n".join(text) + collapse)


def test_one_transfer_takes_latency_plus_bytes_over_bandwidth() -> None:
    got = run(Network(tree(1, 2)), [Transfer(0, 0, 1, 50_000)])
    assert got.total_us == pytest.approx(0.6 + 1.0)
    assert got.links[0].busy == pytest.approx(1.0 / 1.6)
    across = run(Network(tree(2, 1)), [Transfer(0, 0, 1, 50_000)])
    assert across.total_us == pytest.approx(1.0 + 1.0)


def test_flows_share_an_uplink_and_speed_up_when_one_ends() -> None:
    """Two flows over one 50 GB/s uplink: 25 each until the short one ends, then 50."""
    got = run(Network(tree(2, 2)), [Transfer(0, 0, 2, 50_000), Transfer(0, 1, 3, 25_000)])
    # 25 kB each takes 1 us at 25 GB/s; the long flow's other 25 kB takes 0.5 us at 50 GB/s.
    assert got.total_us == pytest.approx(1.0 + 1.0 + 0.5)
    assert got.finish_us[3] == pytest.approx(1.0 + 1.0)


def test_an_edge_is_a_queue() -> None:
    one = run(Network(tree(1, 2)), [Transfer(0, 0, 1, 100_000)])
    two = run(Network(tree(1, 2)), [Transfer(0, 0, 1, 50_000), Transfer(1, 0, 1, 50_000)])
    assert two.total_us == pytest.approx(one.total_us)
    assert [h.start_us for h in two.hops] == pytest.approx([0.0, 1.0])


def test_dependencies_wait_for_arrival_and_software() -> None:
    got = run(
        Network(tree(1, 3)),
        [Transfer(0, 0, 1, 50_000), Transfer(1, 1, 2, 50_000, (0,), delay_us=0.5)],
    )
    assert got.hops[1].start_us == pytest.approx(1.6 + 0.5)
    assert got.total_us == pytest.approx(2.1 + 1.6)


def test_a_load_pays_the_way_twice_and_its_own_limit() -> None:
    got = run(Network(tree(1, 2)), [Transfer(0, 0, 1, 40_000, engine="load")])
    assert got.total_us == pytest.approx(1.2 + 1.0)
    assert got.finish_us == (pytest.approx(2.2), 0.0)
    assert got.links[0].link in ("g1 up", "g0 down")


def test_collapse_hits_only_its_pattern() -> None:
    rule = "\n[[collapse]]\nbandwidth = 2.0\nmin_sources = 2\nmin_roots = 2\n"
    box = tree(3, 2, collapse=rule)
    spread = [Transfer(0, 0, 2, 20_000), Transfer(0, 1, 4, 20_000)]
    together = [Transfer(0, 0, 2, 20_000), Transfer(0, 1, 3, 20_000)]
    assert run(Network(box), spread).total_us == pytest.approx(1.0 + 20.0)
    assert run(Network(box), together).total_us == pytest.approx(1.0 + 0.8)
    reads = [t._replace(engine="load") for t in spread]
    assert run(Network(box), reads).total_us < 5.0


@pytest.mark.parametrize("seed", range(8))
def test_shares_agree_with_the_reference(seed: int) -> None:
    rule = "\n[[collapse]]\nbandwidth = 3.0\n"
    box = tree(3, 3, store=35.0, collapse=rule if seed % 2 else "")
    pairs = [(a, b) for a in range(9) for b in range(9) if a != b]
    flows = random.Random(seed).sample(pairs, 5 + 6 * seed)
    for engine in ("store", "load", "copy"):
        network = Network(box)
        edges = [network.edge(a, b, engine) for a, b in flows]
        active = np.zeros(len(edges), dtype=bool)
        active[edges] = True
        np.testing.assert_allclose(
            network.shares(active)[edges], shares(box, flows, engine), rtol=1e-6
        )


def test_bad_transfers_are_named() -> None:
    network = Network(tree(1, 2))
    with pytest.raises(SimulationError, match="transfer 0 goes from rank 0 to rank 5"):
        run(network, [Transfer(0, 0, 5, 1)])
    with pytest.raises(SimulationError, match="transfer 0 depends on"):
        run(network, [Transfer(0, 0, 1, 1, (0,))])
    with pytest.raises(SimulationError, match="goes to itself"):
        run(network, [Transfer(0, 1, 1, 1)])
    assert run(network, []).total_us == 0.0


def test_equal_inputs_give_equal_runs() -> None:
    box = tree(2, 4)
    call = rivals.staged_push(box, range(8), 57344)
    assert run(Network(box), call.transfers) == run(Network(box), call.transfers)


@pytest.mark.parametrize("method", simulate.methods())
@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (2, 3), (2, 4), (3, 2), (4, 4)])
def test_every_rival_runs_on_every_shape(method: str, shape: tuple[int, int]) -> None:
    box = tree(*shape)
    small, large = (simulate.rival(box, method, n).total_us for n in (4096, 1 << 20))
    assert 0 < small < large
    world = shape[0] * shape[1]
    if method == "nccl-ll":
        assert small > 2 * (world - 1) * 0.6


def test_ring_keeps_neighbours_together() -> None:
    """A numbering that alternates between switches must not make the ring cross at every step."""
    box = tree(2, 4)
    order = rivals.ring_order(box, [0, 4, 1, 5, 2, 6, 3, 7])
    gpus = [[0, 4, 1, 5, 2, 6, 3, 7][i] for i in order]
    crossings = sum((a // 4) != (b // 4) for a, b in zip(gpus, [*gpus[1:], gpus[0]]))
    assert crossings == 2


def test_one_shot_crosses_the_boundary_sixteen_times() -> None:
    """4 senders x 4 receivers x the message over one uplink."""
    got = simulate.rival(tree(2, 4), "one-shot-push", 10_000)
    uplink = next(u for u in got.links if u.link == "sw0 up")
    assert uplink.nbytes == 16 * 10_000


@pytest.mark.parametrize("method", ["nccl-ll", "one-shot-push", "island-pull", "staged-push"])
def test_sixteen_gpus_and_64_rows_in_a_second(method: str) -> None:
    box = tree(4, 4)
    start = time.process_time()
    simulate.rival(box, method, 64 * 7168 * 2)
    assert time.process_time() - start < 1.0


# --- the plugin's own schedules --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", simulate.own_names())
@pytest.mark.parametrize("shape", [(1, 2), (1, 3), (3, 1), (2, 3), (2, 4), (4, 2)])
def test_own_schedules_move_what_core_says(schedule: str, shape: tuple[int, int]) -> None:
    """Bytes per edge in the simulation are those of `comm.schedule`."""
    world = shape[0] * shape[1]
    box = tree(*shape)
    for islands in simulate_own.partitions(box, range(world)):
        said = describe(schedule, world=world, rows=4, hidden=7168, islands=islands)
        call = simulate_own.build(schedule, islands, 4, 7168)
        moved: dict[tuple[int, int], int] = {}
        for t in call.transfers:
            moved[t.source, t.target] = moved.get((t.source, t.target), 0) + t.nbytes
        assert moved == said.edges
        assert max(t.hop for t in call.transfers) == said.hops - 1
        done = run(Network(box), call.transfers)
        starts = [h.start_us for h in done.hops]
        assert starts == sorted(starts)
        assert done.total_us > said.hops * 0.6


def test_a_hop_waits_only_for_its_own_tiles() -> None:
    """Two tiles of two owners: a slow push of one tile must not hold back the other's gather."""
    stores = moves("two_shot", world=2, rows=1, hidden=512)
    call = simulate_own.transfers_of(stores, tiles=2)
    gathers = [i for i, t in enumerate(call) if t.hop == 1]
    for i in gathers:
        assert len(call[i].after) == 1
        before = call[call[i].after[0]]
        assert (before.source, before.target) == (call[i].target, call[i].source)


def test_large_messages_are_fewer_tiles_with_more_bytes() -> None:
    islands = ((0, 1, 2, 3), (4, 5, 6, 7))
    exact = describe("island_dataflow", world=8, rows=64, hidden=7168, islands=islands)
    call = simulate_own.build("island_dataflow", islands, 64, 7168)
    assert sum(t.nbytes for t in call.transfers) == pytest.approx(
        sum(exact.edges.values()), rel=0.01
    )
    assert len(call.transfers) < 1000


def test_dataflow_crosses_the_boundary_once_and_wins() -> None:
    box = tree(2, 4)
    nbytes = 4 * 7168 * 2
    got = {n: simulate.own(box, n, 4, 7168) for n in ("one_shot", "two_shot", "island_dataflow")}
    crossed = {
        n: next(u.nbytes for u in e.links if u.link == "sw0 up") / nbytes for n, e in got.items()
    }
    assert crossed["one_shot"] == pytest.approx(16)
    assert crossed["two_shot"] == pytest.approx(4)
    assert crossed["island_dataflow"] == pytest.approx(1)
    assert simulate.own_best(box, 4, 7168).method in ("island_dataflow", "island_ring")


def test_more_peers_than_cuda_maps_are_refused() -> None:
    box = tree(4, 4)
    with pytest.raises(SimulationError, match="store to 15 peers, CUDA maps 8"):
        simulate.own(box, "two_shot", 4, 7168)
    assert simulate.own_best(box, 4, 7168).method.startswith("island")
    with pytest.raises(SimulationError, match="no such schedule"):
        simulate.own(box, "carrier-pigeon", 4, 7168)


def test_ring_order_avoids_the_collapse() -> None:
    """Two GPUs per switch, two switches per socket: writes collapse when a switch writes to two roots."""
    box = published_machine("dual-socket-virtual-switches")
    large = {n: simulate.own(box, n, 64, 7168).total_us for n in ("one_shot", "island_ring")}
    assert large["one_shot"] > 20 * large["island_ring"]
    assert simulate.own_best(box, 64, 7168).method == "island_ring"
    assert (
        simulate.own_best(simulate.healthy(box), 64, 7168).total_us <= large["island_ring"] * 1.01
    )


def test_without_peer_access_only_the_mailbox_is_left() -> None:
    box = described.load(FIXTURES / "geforce-no-p2p" / "fabric.toml")
    assert simulate.own_best(box, 4, 7168).method == "mailbox"
    with pytest.raises(SimulationError, match="no peer access between"):
        simulate.own(box, "one_shot", 4, 7168)
    mailbox = simulate.own(box, "mailbox", 1, 256)
    # Two hops through pinned host memory at least.
    assert mailbox.total_us - mailbox.fixed_us > 2 * box.host.mailbox_latency_us


@pytest.mark.parametrize("folder", sorted(p.name for p in FIXTURES.iterdir()))
def test_every_fixture_simulates_from_figures_and_from_its_tree(folder: str) -> None:
    figures = simulate_machine.read(FIXTURES / folder)
    tree_only = simulate_machine.from_topology(discover(Saved(FIXTURES / folder)), folder)
    assert (tree_only.world, tree_only.islands()) == (figures.world, figures.islands())
    healthy = [simulate.healthy(m) for m in (figures, tree_only)]
    a, b = (simulate.rival(m, "nccl", 57344).total_us for m in healthy)
    assert a == pytest.approx(b, rel=0.15)
    assert simulate.own_best(figures, 4, 7168).total_us > 0


def test_one_of_ours_at_16_gpus_and_64_rows_in_a_second() -> None:
    box = tree(4, 4)
    start = time.process_time()
    simulate.own_best(box, 64, 7168)
    assert time.process_time() - start < 3.0  # three schedules and two partitions


# --- against closed forms --------------------------------------------------------------------------


def wire_us(box: Machine, schedule: str, islands: tuple[tuple[int, ...], ...], rows: int) -> float:
    """Simulated time on the wire alone: no launch, no software between hops."""
    costs = simulate_own.Costs(fixed_us=0.0, hop_us=0.0, epilogue_us=0.0, pieces=8)
    call = simulate_own.build(schedule, islands, rows, 6144, costs)
    return run(Network(box), call.transfers).total_us


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_flat_schedules_meet_their_closed_forms(world: int, rows: int) -> None:
    """One switch: one-shot a + (N-1) S/W; two-shot 2 a + 2 (N-1)/N S/W phase by phase.

    Tiles of the second hop leave while others still arrive, so up to one latency of the two-shot is hidden.
    """
    box, flat = tree(1, world, port=56.0), (tuple(range(world)),)
    size, alpha = rows * 6144 * 2 / 56e3, 0.6
    assert wire_us(box, "one_shot", flat, rows) == pytest.approx(
        alpha + (world - 1) * size, rel=0.02
    )
    moved = 2 * (world - 1) / world * size
    got = wire_us(box, "two_shot", flat, rows)
    assert max(2 * alpha, alpha + moved) * 0.99 < got < (2 * alpha + moved) * 1.03


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_island_dataflow_lies_between_full_links_and_phases(rows: int) -> None:
    """4+4 over one uplink each: never faster than its latencies or its fullest link, never slower than phases."""
    box, islands = tree(2, 4, port=56.0, uplink=56.0), ((0, 1, 2, 3), (4, 5, 6, 7))
    size, inside, across = rows * 6144 * 2 / 56e3, 0.6, 1.0
    latencies = 2 * inside + across
    least = max(latencies, inside + 1.75 * size)
    phases = latencies + 2 * 0.75 * size + size
    got = wire_us(box, "island_dataflow", islands, rows)
    assert least * 0.99 <= got <= phases * 1.02
    if rows == 32:
        # Tiles flow on independently: nearer to full links than to phases.
        assert got < least + 0.5 * (phases - least)
