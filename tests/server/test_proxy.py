"""The proxy target and its head: the known walk, one draft token right per pass, with the plugin's sums."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_sm120.sim import net, proxy, tokenizer
from sglang_sm120.sim.server import SimServer, eagle3_flags

TINY = proxy.Proxy(
    "tiny-proxy",
    net.Shape(
        vocab=tokenizer.VOCAB_SIZE, layers=5, hidden=256, heads=4, kv_heads=4, intermediate=256,
        mla=net.Mla(), moe=net.Moe(),
    ),
    net.Shape(vocab=tokenizer.VOCAB_SIZE, layers=1, hidden=256, heads=4, kv_heads=2, intermediate=256),
    aux_layers=(1, 2, 3),
)  # fmt: skip


def test_the_proxy_walks_and_its_head_is_right_once_per_pass(tmp_path: Path) -> None:
    built = proxy.build(TINY, tmp_path / "cache")
    again = proxy.build(TINY, tmp_path / "cache")
    assert built == again and Path(built.target, "model.safetensors").exists()
    flags = [*eagle3_flags(built.drafter), "--enable-sm120-fusion"]
    with SimServer(built.target, flags, log=tmp_path / "log") as server:
        (answer,) = server.generate([[7, proxy.successor(7)]], max_new_tokens=24)
        assert list(answer.output_ids) == [proxy.successor(7, n) for n in range(2, 26)]
        assert answer.accept_length == pytest.approx(2.0, abs=0.25)
