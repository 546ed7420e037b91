"""What the host did beside a server: work is booked to the right process and thread."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
from sglang_sm120.sim.host_use import HostWatch

# The main thread sleeps; the other one works until stdin ends.
BUSY_THREAD = """
import sys, threading
def work():
    while True: pass
threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""
IDLE = 'import sys; print("up", flush=True); sys.stdin.read()'


def test_work_is_booked_to_its_thread_and_rank() -> None:
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for text in (BUSY_THREAD, IDLE)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()
        watch = HostWatch([psutil.Process(p.pid) for p in programs])
        deadline = time.monotonic() + 30
        # /proc counts in ticks of 10 ms; a loaded machine may take a while to run the thread for some.
        while (use := watch.use()).ranks[0].busiest * 30 < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        busy, idle = use.ranks
        assert busy.busiest > 0.1 and busy.others >= busy.busiest > busy.main
        assert idle.main < busy.busiest and idle.others == 0
        assert 0 < use.busy <= use.cores + 0.5
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_a_rank_that_ended_counts_as_idle() -> None:
    program = subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE)
    watch = HostWatch([psutil.Process(program.pid)])
    program.kill()
    program.communicate()
    (gone,) = watch.use().ranks
    assert (gone.main, gone.others, gone.preempted) == (0, 0, 0)
