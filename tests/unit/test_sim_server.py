"""The server launcher, against a small stand-in for SGLang's server."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import time

import psutil
import pytest
from sglang_sm120.sim import server as sim_server
from sglang_sm120.sim.environment import free_port
from sglang_sm120.sim.server import ServerError, SimServer, eagle3_flags

STAND_IN = textwrap.dedent(
    """
    import json, os, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    port, mode = int(sys.argv[1]), sys.argv[2]
    print("stand-in says hello", flush=True)
    if mode == "dies":
        sys.exit("no such model")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "scheduler_TP1"])
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "silent":
        time.sleep(600)
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass
        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        def do_GET(self):
            states = [{"avg_spec_accept_length": 2.5}] if mode == "spec" else [{}]
            self.reply(200, {"internal_states": states})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/v1/completions":
                self.reply(200, {"choices": [{"text": body["prompt"][::-1]}], "got": body})
            elif body.get("text") == "bad":
                self.reply(400, {"error": "bad prompt"})
            else:
                prompt = body.get("text") or "".join(map(chr, body["input_ids"]))
                time.sleep(0.2 if prompt == "slow" else 0)
                meta = {"spec_accept_length": 3.0, "spec_verify_ct": 4, "params": body["sampling_params"]}
                self.reply(200, {"text": prompt.upper(), "output_ids": [1, 2], "meta_info": meta})
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class StandIn(SimServer):
    def __init__(self, mode="plain", **kwargs):
        super().__init__("/no/model", **kwargs)
        self.mode = mode

    @property
    def command(self):
        return [sys.executable, "-c", STAND_IN, str(self.port), self.mode]


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_requests_answers_and_the_end_of_every_child(tmp_path):
    with StandIn(log=tmp_path / "log") as server:
        assert server.running() and server.startup_s < 60
        got = server.generate(["slow", "b", "c"], max_new_tokens=2, concurrency=3, top_p=0.5)
        assert [g.text for g in got] == ["SLOW", "B", "C"]
        assert got[0].output_ids == (1, 2)
        assert got[0].accept_length == 3.0 and got[0].verify_passes == 4
        params = got[0].meta["params"]
        assert params == {
            "max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True, "top_p": 0.5
        }  # fmt: skip
        assert server.generate([[104, 105]], max_new_tokens=1)[0].text == "HI"
        done = server.complete("abc", max_tokens=7, stop="x")
        assert done["choices"][0]["text"] == "cba"
        assert done["got"]["max_tokens"] == 7 and done["got"]["stop"] == "x"
        assert server.accept_length() is None
        with pytest.raises(ServerError, match="status 400.*bad prompt"):
            server.generate(["bad"], max_new_tokens=1)
        family = [psutil.Process(server.pid), *server.children()]
        assert len(family) == 2
        assert server.scheduler(1) == family[1]
        with pytest.raises(ServerError, match="rank 0"):
            server.scheduler(0)
    assert alive(family) == [] and not server.running()
    server.stop()  # a second time is allowed
    with pytest.raises(ServerError, match="GET /server_info failed"):
        server.info()


def test_mean_accept_length():
    with StandIn("spec") as server:
        assert server.accept_length() == 2.5


def test_an_early_end_gives_the_status_and_the_log(tmp_path):
    with pytest.raises(ServerError) as error, StandIn("dies", log=tmp_path / "log"):
        pass
    text = str(error.value)
    assert (
        "ended with status 1" in text and "no such model" in text and str(tmp_path / "log") in text
    )


def test_a_server_that_is_never_ready_is_stopped_in_time():
    server = StandIn("silent", start_timeout_s=1.5)
    began = time.monotonic()
    with pytest.raises(ServerError, match=r"not ready after 2 s.*|not ready after 1 s.*"):
        server.start()
    assert time.monotonic() - began < 15 and not server.running()
    assert server.children() == []


def test_a_child_that_ignores_the_polite_signal_is_killed():
    server = StandIn("stubborn").start()
    family = [psutil.Process(server.pid), *server.children()]
    server.stop(grace_s=0.3)
    assert alive(family) == []


def test_waiting_for_the_end():
    server = StandIn("dies")
    server.spawn()
    assert server.wait_exit(30) == 1
    server.stop()
    with StandIn() as running, pytest.raises(ServerError, match="still ran after"):
        running.wait_exit(0.1)


def test_a_server_starts_once_and_has_no_pid_before():
    server = StandIn("dies")
    with pytest.raises(ServerError, match="not started"):
        _ = server.pid
    server.spawn()
    with pytest.raises(ServerError, match="started before"):
        server.spawn()
    server.stop()


def test_command_and_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    monkeypatch.setenv("DROP_ME", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    server = SimServer("/m", ["--flag"], tp=4, env={"DROP_ME": None, "ADDED": "2"})
    command = server.command
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert command[command.index("--tp") + 1] == "4" and command[-1] == "--flag"
    assert command[command.index("--port") + 1] == str(server.port)
    assert server._env["SGLANG_PLATFORM"] == "other" and server._env["ADDED"] == "2"
    assert "DROP_ME" not in server._env and server._env["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in server._env
    monkeypatch.delenv("SGLANG_PLATFORM")
    env = SimServer("/m")._env
    assert env["SGLANG_PLATFORM"] == "sm120_sim" and env["CUDA_VISIBLE_DEVICES"] == ""


def test_eagle_flags_carry_the_tree():
    flags = eagle3_flags("/d", steps=5, topk=4, draft_tokens=8)
    pairs = dict(zip(flags[::2], flags[1::2]))
    assert pairs["--speculative-algorithm"] == "EAGLE3"
    assert pairs["--speculative-draft-model-path"] == "/d"
    assert pairs["--speculative-num-steps"] == "5"
    assert pairs["--speculative-eagle-topk"] == "4"
    assert pairs["--speculative-num-draft-tokens"] == "8"


def test_free_port_skips_a_taken_one(monkeypatch):
    first = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert free_port() != first
    monkeypatch.setattr(sim_server.os, "getpid", lambda: os.getppid())
    assert 12000 <= free_port() < 32000


def test_tail_cuts_very_long_lines(tmp_path):
    server = SimServer("/m", log=tmp_path / "log")
    server.log.write_text("first\n" + "x" * 5000 + "\nlast\n")
    lines = server.tail(2).splitlines()
    assert lines[0] == f"log: {tmp_path / 'log'}" and len(lines[1]) == 500 and lines[2] == "last"
