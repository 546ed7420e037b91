"""The event engine: shares, queues, latency, collapse, determinism, speed; and the rivals' schedules."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from sglang_sm120.fabric import machine as described
from sglang_sm120.fabric import rivals, simulate
from sglang_sm120.fabric.flows import shares
from sglang_sm120.fabric.machine import Machine
from sglang_sm120.fabric.simulate_engine import Network, SimulationError, Transfer, run


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
