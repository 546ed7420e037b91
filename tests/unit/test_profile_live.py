"""Profiling a running server, against an HTTP server that behaves like SGLang's."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from sglang_sm120.verify.live import LiveError, profile_server
from sglang_sm120.verify.profile import analyse
from sglang_sm120.verify.trace import rank_of, read_trace
from synthetic_trace import TraceMaker, verify_pass


class Sglang(BaseHTTPRequestHandler):
    """Serves /generate and /start_profile; writes two ranks' traces a moment after it was asked."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length))
        self.server.calls.append((self.path, body))
        status = 200
        if self.path == "/generate":
            time.sleep(0.05)
        elif self.path == "/start_profile":
            if self.server.refuses:
                status = 500
            elif body["output_dir"]:
                threading.Thread(target=self._write, args=(Path(body["output_dir"]),)).start()
        answer = b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _write(self, folder: Path) -> None:
        if self.server.silent:
            return
        time.sleep(0.3)
        for rank in range(2):
            maker = TraceMaker()
            verify_pass(maker, layers=4, sum_us=50.0, pass_us=1000.0)
            maker.save(folder / f"17000-TP-{rank}.trace.json.gz")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Sglang)
    httpd.calls, httpd.refuses, httpd.silent = [], False, False
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_traces_of_all_ranks_are_fetched(server, tmp_path):
    files = profile_server(url_of(server), tmp_path, steps=10, concurrency=2)
    assert [rank_of(f, -1) for f in files] == [0, 1]
    profile = analyse([read_trace(f, rank=rank_of(f, 0)) for f in files])
    assert profile.main["VERIFY"].all_reduces == 8
    asked = [body for path, body in server.calls if path == "/start_profile"]
    assert len(asked) == 1
    assert asked[0]["num_steps"] == 10 and asked[0]["activities"] == ["CPU", "GPU"]
    first_profile = [path for path, _ in server.calls].index("/start_profile")
    assert first_profile >= 2, "requests run before recording begins"


def test_a_server_that_refuses_or_stays_silent_is_reported(server, tmp_path):
    server.refuses = True
    with pytest.raises(LiveError, match="500"):
        profile_server(url_of(server), tmp_path, 5, 1)
    server.refuses, server.silent = False, True
    with pytest.raises(LiveError, match="wrote no trace"):
        profile_server(url_of(server), tmp_path, 5, 1, timeout_s=1.0)


def test_no_server_is_reported(tmp_path):
    with pytest.raises(LiveError, match="ConnectError"):
        profile_server("http://127.0.0.1:9", tmp_path, 5, 1, timeout_s=2.0)
