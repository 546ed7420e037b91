"""What the CPU platform replaces in SGLang: it must exist as declared, and the platform must refuse otherwise."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed")

from sglang.srt.plugins.hook_registry import HookType
from sglang_sm120.sim import patches, platform


def test_every_replaced_function_of_the_installed_sglang_is_as_declared():
    assert len(patches.WORKER_TARGETS) + len(patches.LAUNCH_TARGETS) >= 6
    assert patches.mismatches() == []


def fake_target(monkeypatch, function):
    module = types.ModuleType("fake_sglang")
    if function is not None:
        module.fused = function
    monkeypatch.setitem(sys.modules, "fake_sglang", module)
    return patches.Target("fake_sglang.fused", lambda x: x, HookType.REPLACE, ("x", "scale"))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (None, "fake_sglang.fused does not exist"),
        (lambda x, factor: x, "fake_sglang.fused lost its parameters scale"),
    ],
)
def test_a_missing_or_changed_function_ends_the_worker_with_a_sentence(
    monkeypatch, function, sentence
):
    target = fake_target(monkeypatch, function)
    assert sentence in target.mismatch()
    monkeypatch.setattr(patches, "WORKER_TARGETS", (target,))
    with pytest.raises(patches.PlatformError, match="does not fit the installed SGLang") as error:
        patches.check_installed()
    assert sentence in str(error.value)


def test_a_function_that_was_not_replaced_is_noticed(monkeypatch):
    target = fake_target(monkeypatch, lambda x, scale: x)
    assert target.mismatch() is None
    monkeypatch.setattr(patches, "WORKER_TARGETS", (target,))
    with pytest.raises(patches.PlatformError, match="did not apply the replacement of fake_sglang"):
        patches.check_installed()


@pytest.mark.parametrize("name", ["sinks", "sliding_window_size", "score_mod", "lse_extend"])
def test_attention_options_that_change_the_result_are_refused(name):
    with pytest.raises(patches.PlatformError, match=f"does not support {name}"):
        patches._refuse_options("decode attention", {name: 5}, 1.0, 1.0)
    with pytest.raises(patches.PlatformError, match="scaled KV pools"):
        patches._refuse_options("decode attention", {}, 1.0, 0.5)
    patches._refuse_options("decode attention", {"use_pdl": True, name: None}, 1.0, None)


def test_bit_packed_masks_are_refused():
    empty = torch.zeros(0)
    with pytest.raises(patches.PlatformError, match="tree masks"):
        patches._build_tree(*[empty] * 8, 1, 1, 1, 2)


def test_platform_is_active_only_when_asked_for(monkeypatch):
    environment = {"OMP_NUM_THREADS": "3"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(platform.patches, "install_launch_hooks", lambda: None)
    assert platform.activate() is None and list(environment) == ["OMP_NUM_THREADS"]
    environment["SGLANG_PLATFORM"] = platform.NAME
    assert platform.activate() == "sglang_sm120.sim.platform.SimPlatform"
    assert environment["OMP_NUM_THREADS"] == "3"  # the user's own value stays
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") >= 15


def test_ranks_take_turns_on_the_processors():
    env = platform.default_env([4, 6, 7])
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].startswith("4|6|7|4|6|7|4")


def test_platform_serves_eagle_only():
    sim = platform.SimPlatform()
    assert sim.is_out_of_tree() and sim.get_default_attention_backend() == "triton"
    assert sim.supports_speculative_algorithm("EAGLE3")
    assert not sim.supports_speculative_algorithm("DFLASH")
    assert sim.supports_speculative_draft_attention_backend("EAGLE3", "triton")
    assert not sim.supports_speculative_draft_attention_backend("EAGLE3", "flashinfer")


def test_names_that_sglang_leaves_empty_are_filled_where_they_are_used(monkeypatch):
    used = types.ModuleType("fake_sampler")
    used.pick = None
    monkeypatch.setitem(sys.modules, "fake_sampler", used)
    monkeypatch.setattr(patches, "_SAMPLER", "fake_sampler")
    monkeypatch.setattr(patches, "EMPTY_NAMES", (("fake_sampler", "pick", len),))
    patches.fill_empty_names()
    assert used.pick is len
    monkeypatch.setattr(patches, "EMPTY_NAMES", (("fake_sampler", "gone", len),))
    with pytest.raises(patches.PlatformError, match="fake_sampler has no gone"):
        patches.fill_empty_names()
