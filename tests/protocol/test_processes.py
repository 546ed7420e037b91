"""Ranks as processes: every fault ends within the bound, on every other rank, with the sentence that names it."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from protocol_oracle import canonical_sum
from protocol_rig import islands_of, same_bits
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.host import HostCommunicator

# Forked ranks need no second import of torch; they must not use its thread pool.
torch.set_num_threads(1)
CONTEXT = get_context("fork")
HIDDEN = 520
Body = Callable[[HostCommunicator, int], object]


def _rank(pipe: Connection, body: Body, rank: int, world: int, session: str, options: dict) -> None:
    began = time.monotonic()
    try:
        comm = HostCommunicator("test", rank, world, session=session, **options)
        began = time.monotonic()
        pipe.send(("value", body(comm, rank), time.monotonic() - began))
        comm.close()
    except CollectiveError as error:
        pipe.send(("error", str(error), time.monotonic() - began))
    except BaseException:
        pipe.send(("broken", traceback.format_exc(), time.monotonic() - began))


def run_ranks(world: int, body: Body, **options: object) -> list[tuple[str, object, float]]:
    """Run `body` on every rank; (kind, value or error text, seconds), kind "dead" for a killed rank."""
    session = f"test-{os.getpid()}-{time.monotonic_ns()}"
    pipes, children = [], []
    for rank in range(world):
        mine, theirs = CONTEXT.Pipe()
        child = CONTEXT.Process(target=_rank, args=(theirs, body, rank, world, session, options))
        child.start()
        theirs.close()
        pipes.append(mine)
        children.append(child)
    results = []
    for pipe, child in zip(pipes, children):
        try:
            assert pipe.poll(60), "a rank is stuck"
            results.append(pipe.recv())
        except EOFError:
            results.append(("dead", "", 0.0))
        child.join(10)
        assert child.exitcode is not None
    assert not list(Path("/dev/shm").glob(f"*{session}*"))
    return results


def inputs(world: int, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(world, rows, hidden, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("world", "layout", "schedule"),
    [(2, "", "auto"), (3, "", "auto"), (4, "0,1;2,3", "island_dataflow"), (6, "", "two_shot")],
)
def test_processes_agree_with_the_canonical_sum(world: int, layout: str, schedule: str) -> None:
    shapes = [(1, 7168), (3, 2880), (0, 64), (5, 8), (300, 1024)]

    def body(comm: HostCommunicator, rank: int) -> bool:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for rows, hidden in shapes:
                assert comm.admits(Op.ALL_REDUCE, rows, hidden, dtype)
                x = inputs(world, rows, hidden, dtype)
                expected = canonical_sum(x, islands_of(world, layout))
                assert same_bits(comm.all_reduce(x[rank]), expected)
                # A strided view that starts off any alignment but its own.
                wide = torch.zeros(rows, hidden + 3, dtype=dtype)
                wide[:, 1 : hidden + 1] = x[rank]
                assert same_bits(comm.all_reduce(wide[:, 1 : hidden + 1]), expected)
        return comm.calls[Op.ALL_REDUCE] == 6 * len(shapes)

    results = run_ranks(world, body, islands=layout, schedule=schedule)
    assert [(kind, value) for kind, value, _ in results] == [("value", True)] * world


@pytest.mark.parametrize(
    ("world", "schedule", "phase"),
    [(2, "one_shot", phase) for phase in range(6)] + [(3, "two_shot", 2), (3, "two_shot", 4)],
)
def test_a_killed_rank_is_named_by_all_others_long_before_the_timeout(
    world: int, schedule: str, phase: int
) -> None:
    victim = world - 1

    def body(comm: HostCommunicator, rank: int) -> None:
        if rank == victim:
            comm._lib.host_kill_self_at(comm._handle, 5, phase)
        x = torch.ones(4, HIDDEN)
        for _ in range(20):
            comm.all_reduce_rmsnorm(x, x, torch.ones(HIDDEN), 1e-6)

    results = run_ranks(world, body, schedule=schedule, timeout_ms=30_000)
    assert results[victim][0] == "dead"
    for kind, text, seconds in results[:victim]:
        assert kind == "error"
        # What it stored before it died still counts, so the call after may be the one that fails.
        assert f"rank {victim} missing in call " in str(text)
        assert f"(all_reduce_rmsnorm, 4 x {HIDDEN})" in str(text)
        assert "process died" in str(text)
        assert seconds < 5


def test_a_rank_that_never_calls_is_named_within_the_bound() -> None:
    def body(comm: HostCommunicator, rank: int) -> object:
        comm.all_reduce(torch.ones(2, HIDDEN))
        if rank == 1:
            time.sleep(2.5)
            return "slept"
        with pytest.raises(CollectiveError) as caught:
            comm.all_reduce(torch.ones(2, HIDDEN))
        record = comm.flight_record()
        assert record is not None
        assert (record.source, record.call, record.rows, record.hidden) == (1, 1, 2, HIDDEN)
        with pytest.raises(CollectiveError):  # the group stays failed
            comm.all_reduce(torch.ones(2, HIDDEN))
        return str(caught.value)

    results = run_ranks(3, body, timeout_ms=500)
    for rank in (0, 2):
        text = str(results[rank][1])
        assert f"rank 1 missing in call 1 (all_reduce, 2 x {HIDDEN})" in text
        assert results[rank][2] < 2


def test_a_stopped_rank_is_named_and_learns_of_it_when_it_wakes() -> None:
    def body(comm: HostCommunicator, rank: int) -> str:
        comm.all_reduce(torch.ones(1, 64))
        if rank == 0:
            parent, waker = os.getpid(), os.fork()
            if waker == 0:
                time.sleep(1.5)
                os.kill(parent, signal.SIGCONT)
                os._exit(0)
            os.kill(parent, signal.SIGSTOP)
        with pytest.raises(CollectiveError) as caught:
            comm.all_reduce(torch.ones(1, 64))
        return str(caught.value)

    for _, text, _ in run_ranks(3, body, timeout_ms=400):
        assert "rank 0 missing in call 1 (all_reduce, 1 x 64)" in str(text)


@pytest.mark.parametrize("world", [2, 4])
def test_another_shape_is_a_call_mismatch_with_both_shapes_on_every_rank(world: int) -> None:
    def body(comm: HostCommunicator, rank: int) -> str:
        comm.all_reduce(torch.ones(5, HIDDEN))
        with pytest.raises(CollectiveError) as caught:
            comm.all_reduce(torch.ones(4 if rank == 1 else 5, HIDDEN))
        return str(caught.value)

    for _, text, seconds in run_ranks(world, body, timeout_ms=10_000):
        assert "call mismatch in call 1" in str(text)
        assert f"all_reduce 4 x {HIDDEN} fp32" in str(text)
        assert f"all_reduce 5 x {HIDDEN} fp32" in str(text)
        assert seconds < 5


def test_another_operation_and_another_dtype_are_mismatches_too() -> None:
    def body(comm: HostCommunicator, rank: int) -> str:
        x = torch.ones(2, 64)
        with pytest.raises(CollectiveError) as caught:
            if rank == 0:
                comm.all_reduce_rmsnorm(x, x, torch.ones(64), 1e-6)
            else:
                comm.all_reduce(x.bfloat16())
        return str(caught.value)

    for _, text, _ in run_ranks(2, body):
        assert "all_reduce_rmsnorm 2 x 64 fp32" in str(text)
        assert "all_reduce 2 x 64 bf16" in str(text)


def test_zero_rows_on_one_rank_only_is_a_mismatch() -> None:
    def body(comm: HostCommunicator, rank: int) -> str:
        with pytest.raises(CollectiveError) as caught:
            comm.all_reduce(torch.ones(0 if rank == 0 else 3, 64))
        return str(caught.value)

    for _, text, _ in run_ranks(2, body):
        assert "0 x 64" in str(text) and "3 x 64" in str(text)


def test_a_rank_that_closed_is_named() -> None:
    def body(comm: HostCommunicator, rank: int) -> str:
        comm.all_reduce(torch.ones(1, 64))
        if rank == 1:
            comm.close()
            time.sleep(1)
            return "closed"
        with pytest.raises(CollectiveError) as caught:
            comm.all_reduce(torch.ones(1, 64))
        return str(caught.value)

    results = run_ranks(2, body, timeout_ms=20_000)
    assert "rank 1 missing in call 1" in str(results[0][1])
    assert "closed" in str(results[0][1])


def test_two_threads_on_one_channel_are_refused_and_two_channels_work() -> None:
    def body(comm: HostCommunicator, rank: int) -> object:
        second = comm.channel(1)
        if rank == 0:
            # Rank 1 comes late, so this rank is still inside its first call.
            inside = threading.Thread(target=lambda: comm.all_reduce(torch.ones(1, 64)))
            inside.start()
            time.sleep(0.3)
            with pytest.raises(CollectiveError, match=r"channel 0 is busy"):
                comm.all_reduce(torch.ones(1, 64))
            total = second.all_reduce(torch.full((1, 64), 2.0))
            inside.join()
        else:
            total = second.all_reduce(torch.full((1, 64), 3.0))
            time.sleep(0.6)
            comm.all_reduce(torch.ones(1, 64))
        return float(total[0, 0])

    results = run_ranks(2, body, channels=2)
    assert [value for _, value, _ in results] == [5.0, 5.0]


def test_a_rank_that_never_joins_is_named_and_nothing_is_left() -> None:
    session = f"test-{os.getpid()}-alone"
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank\(s\) 1, 2 of 3 did not join"):
        HostCommunicator("test", 0, 3, session=session, join_timeout_ms=300)
    assert time.monotonic() - began < 10
    assert not list(Path("/dev/shm").glob(f"*{session}*"))
    with pytest.raises(CollectiveError, match="rank 0 did not create"):
        HostCommunicator("test", 1, 3, session=session, join_timeout_ms=100)
