"""The watch over the other ranks' processes: it reports a death at once, and no orderly exit."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
from sglang_sm120.comm import peers as watching
from sglang_sm120.comm.factory import Peer
from sglang_sm120.comm.peers import PeerWatch

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd on this system")


@pytest.fixture
def other():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def start(process: subprocess.Popen[bytes], **changes: str):
    """This process as rank 0 watching `process` as rank 1, and where deaths arrive."""
    session = uuid.uuid4().hex
    me = Peer.here(0)
    peer = dataclasses.replace(me, rank=1, pid=process.pid, **changes)
    deaths: queue.Queue[tuple[Peer, float]] = queue.Queue()
    watch = PeerWatch(session, 0, [me, peer], lambda p: deaths.put((p, time.monotonic())))
    return watch, deaths, session, peer


def test_killed_rank_is_reported_within_a_second(other):
    watch, deaths, _, peer = start(other)
    assert watch.watched == (1,)
    killed = time.monotonic()
    other.send_signal(signal.SIGKILL)
    reported, at = deaths.get(timeout=5)
    assert reported == peer and at - killed < 1.0
    watch.close()


def test_a_failing_rank_reports_the_death_itself_and_only_once(other):
    watch, deaths, _, peer = start(other)
    watch.report_deaths(0.01)
    assert deaths.empty()
    other.kill()
    watch.report_deaths(5)
    assert deaths.get_nowait()[0] == peer
    watch.report_deaths(0.01)
    with pytest.raises(queue.Empty):
        deaths.get(timeout=3 * watching.GRACE_S + 0.2)
    watch.close()


def test_rank_that_left_in_order_is_not_reported(other):
    watch, deaths, session, _ = start(other)
    watching.say_goodbye(session, 1, [0, 1])
    other.communicate(b"\n", timeout=10)
    with pytest.raises(queue.Empty):
        deaths.get(timeout=3 * watching.GRACE_S + 0.3)
    watch.close()


def test_close_tells_the_others_and_ends_the_thread(other):
    watch, deaths, session, _ = start(other)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.settimeout(5)
        ear.bind(watching.address(session, 1))
        watch.close()
        watch.close()
        assert ear.recv(16) == bytes([0])
    assert not watch._thread.is_alive()
    other.kill()
    with pytest.raises(queue.Empty):
        deaths.get(timeout=0.3)


def test_a_process_that_takes_long_to_end_is_reported_when_its_memory_is_gone(other, monkeypatch):
    watch, deaths, _, _ = start(other)
    monkeypatch.setattr(watch, "_ended", lambda fd: deaths.put(fd))  # the thread gets there too
    monkeypatch.setattr(watching.select, "select", lambda *_: ([], [], []))
    assert not watching.ending(other.pid)
    watch.report_deaths(0.05)
    assert deaths.empty()
    other.kill()
    watch.report_deaths(5)
    assert not deaths.empty()


@pytest.mark.parametrize("elsewhere", [{"machine": "x"}, {"pid_namespace": "pid:[1]"}])
def test_process_numbers_of_another_machine_or_namespace_are_not_watched(other, elsewhere):
    watch, deaths, _, _ = start(other, **elsewhere)
    assert watch.watched == ()
    other.kill()
    with pytest.raises(queue.Empty):
        deaths.get(timeout=0.3)
    watch.close()


def test_session_says_who_died_and_how_far_this_rank_was(other, caplog, tmp_path):
    pytest.importorskip("sglang")
    from collections import Counter
    from types import SimpleNamespace

    from sglang_sm120.comm.communicator import Op
    from sglang_sm120.comm.factory import Outcome
    from sglang_sm120.hooks.session import Session
    from sglang_sm120.options import Options

    name = uuid.uuid4().hex
    me = Peer.here(0)
    peer = dataclasses.replace(me, rank=1, pid=other.pid)
    communicator = SimpleNamespace(
        rank=0,
        calls=Counter({Op.ALL_REDUCE: 4, Op.ALL_REDUCE_RMSNORM: 3}),
        close=lambda: None,
    )
    adapter = SimpleNamespace(communicator=communicator, close=lambda: None)
    session = Session(Options(), "cpu", 0)
    session.adopt("tp", Outcome(None, "host", "", (me, peer), name), adapter)
    other.kill()
    deadline = time.monotonic() + 5
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    assert caplog.messages == [
        f'sglang-sm120: rank 1 of group "tp" (process {other.pid}) has died; rank 0 had finished 7 calls. '
        "The server ends."
    ]
    session.close()
