"""C19: SGLang may switch on by itself a fusion that the GPU cannot run; the plugin's verdict wins and the server starts."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("sglang")

from sglang_sm120.hooks import launch
from sglang_sm120.options import OptionError, Options, to_dict


def resolve(
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: bool,
    backend: str | None = "auto",
    custom_off: bool = False,
    ours: str = "auto",
) -> list[dict]:
    """Run the last resolution step on arguments whose FlashInfer fusion is on; what was changed."""
    view = types.SimpleNamespace(
        tp_size=4, ep_size=1, dp_size=1, attn_dp_size=1, device="cpu",
        flashinfer_allreduce_fusion_backend=backend, disable_custom_all_reduce=custom_off,
    )  # fmt: skip
    changed: list[dict] = []
    monkeypatch.setattr(launch, "resolving_view", lambda args: view)
    monkeypatch.setattr(launch, "declare_resolution", lambda args, who, **kw: changed.append(kw))
    args = types.SimpleNamespace(_sm120=to_dict(Options(enabled=True, backend=ours)))
    args._raw_input = {"flashinfer_allreduce_fusion_backend": backend} if asked else {}
    launch.check_server(args, lambda a: None)
    return changed


def test_c19_a_fusion_that_sglang_switched_on_by_itself_is_switched_off(monkeypatch) -> None:
    assert resolve(monkeypatch, asked=False) == [{"flashinfer_allreduce_fusion_backend": None}]


def test_c19_nothing_is_changed_where_sglang_did_not(monkeypatch) -> None:
    assert resolve(monkeypatch, asked=False, backend=None) == []


def test_c19_a_fusion_that_the_user_asked_for_is_a_contradiction(monkeypatch) -> None:
    with pytest.raises(OptionError, match="want the same sums"):
        resolve(monkeypatch, asked=True)


def test_sums_that_sglang_keeps_for_itself_are_said_or_refused(monkeypatch, caplog) -> None:
    resolve(monkeypatch, asked=False, custom_off=True)
    assert "every sum stays with SGLang and NCCL" in caplog.messages[-1]
    with pytest.raises(OptionError, match="--sm120-backend host cannot serve then"):
        resolve(monkeypatch, asked=False, custom_off=True, ours="host")
