"""The comparison benchmark: settings, the streamed measurement, table and plot, without a real server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmark" / "spec_compare.py"


def _load():
    spec = importlib.util.spec_from_file_location("spec_compare", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["spec_compare"] = module
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


compare = _load()
client = sys.modules["spec_compare_client"]


class OpenAi(BaseHTTPRequestHandler):
    """Streams 30 tokens in 10 chunks, 5 ms apart, after 40 ms of prefill."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["temperature"] == 0.0
        self.send_response(200)
        self.end_headers()
        time.sleep(0.04)
        for i in range(10):
            self._send({"choices": [{"text": f"w{i} "}]})
            time.sleep(0.005)
        details = {"spec_verify_ct": 9, "spec_accept_length": 3.2}
        self._send({"choices": [{"text": ""}], "sglext": {"spec_tokens_details": details}})
        self._send({"choices": [], "usage": {"completion_tokens": 30}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, event: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url():
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), OpenAi)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_prefill_is_not_counted_and_passes_come_from_the_server(url):
    answer = client.complete(url, "hello", 30)
    assert answer.text == "".join(f"w{i} " for i in range(10))
    assert (answer.tokens, answer.passes) == (30, 9)
    assert 0.03 < answer.last_s - answer.first_s < 2.0
    row = compare.measure(url, "x", "low", ["a", "b"], 30, concurrency=1, rounds=2)
    assert row.accept_length == pytest.approx(29 / 9)
    assert row.tokens_per_s == pytest.approx(row.accept_length / row.pass_ms * 1e3, rel=1e-6)


def test_settings_cover_every_kind_and_differ_in_one_thing():
    found = {s.name: s.flags for s in compare.settings("d", [1, 3], "c.json", 8)}
    assert found["plain"] == ()
    assert found["EAGLE-3 k=3"][-1] == "4" and "--enable-sm120-fusion" not in found["EAGLE-3 k=3"]
    assert "NGRAM" in found["n-gram"]
    ours, stock = found["adaptive (ours)"], found["adaptive (SGLang), our sums"]
    assert set(stock) - set(ours) == {"--sm120-verify", "off"}
    assert "--speculative-adaptive" in ours and "c.json" in ours


def test_table_plot_and_differences(tmp_path):
    rows = [
        compare.Row("plain", "low", 80.0, 1.0, 12.5, ("a", "b")),
        compare.Row("plain", "high", 82.0, 1.0, 12.2, ("c",)),
        compare.Row("EAGLE-3 k=3", "low", 60.0, 1.9, 31.0, ("a", "b")),
        compare.Row("EAGLE-3 k=3", "high", 100.0, 3.1, 31.0, ("x",)),
    ]
    text = compare.table(rows, "a rig")
    assert "a rig" in text.splitlines()[0]
    assert "| EAGLE-3 k=3 | 60.0 | 0.75 | 1.90 | 31.0 | 100.0 | 1.22 | 3.10 | 31.0 |" in text
    assert compare.differing(rows) == ["EAGLE-3 k=3, high"]
    compare.plot(rows, "a rig", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_a_launch_line_that_fails_is_reported_and_left_nothing_running():
    line = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        pytest.raises(RuntimeError, match="no such model"),
        compare.serving(line, 1, {}, timeout_s=60.0),
    ):
        pass


def test_a_setting_that_cannot_start_is_named_and_the_others_are_measured(
    url, tmp_path, monkeypatch, capsys
):
    chosen = [compare.Setting("plain", ()), compare.Setting("n-gram", ("--broken",))]
    monkeypatch.setattr(compare, "settings", lambda *_: chosen)

    @contextlib.contextmanager
    def serving(line, port, env, timeout_s):
        if "--broken" in line:
            raise compare.ServerFailed(
                "the server did not start: python\nImportError: no kernel for this device\nkilled"
            )
        yield url

    monkeypatch.setattr(compare, "serving", serving)
    out = tmp_path / "out.json"
    arguments = [
        "--drafter",
        "d",
        "--rounds",
        "1",
        "--out",
        str(out),
        "--plot",
        str(tmp_path / "p.png"),
    ]
    monkeypatch.setattr(sys, "argv", ["spec_compare.py", *arguments, "--", "python", "server"])
    compare.main()
    assert json.loads(out.read_text())["failed"] == {
        "n-gram": "ImportError: no kernel for this device"
    }
    said = capsys.readouterr().out
    assert "| plain |" in said and "not measured: n-gram (ImportError" in said
