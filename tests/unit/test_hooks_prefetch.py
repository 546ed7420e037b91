"""Prefetch in SGLang's layers: which norm announces which weights, for how long a wait, and when nothing is asked for."""

from __future__ import annotations

import types

import pytest

pytest.importorskip("sglang")

import torch
from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.plan import Choice, Entry, Plan
from sglang_sm120.hooks import fusion, prefetch
from sglang_sm120.hooks import session as sessions
from sglang_sm120.hooks.adapter import Sm120AllReduce
from sglang_sm120.hooks.contract import check_binding
from sglang_sm120.options import Options
from sglang_sm120.verify.prefetch import CTAS, Limits, PrefetchError
from torch import nn

HIDDEN, LAYERS = 64, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN)
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.self_attn.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.mlp.down_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))


class Listening(Communicator):
    """Notes what it is told to prefetch; its plan expects `us` for up to 8 rows."""

    def __init__(self, us: float = 50.0, source: str = "timed") -> None:
        super().__init__("tp", 0, 2)
        choice = Choice(backend="native", schedule="one_shot", us=us, source=source)
        self.plan: Plan | None = Plan(
            group="tp", world=2, hidden=HIDDEN, itemsize=2, islands=((0, 1),),
            entries=(Entry(Op.ALL_REDUCE_RMSNORM, 1, choice), Entry(Op.ALL_REDUCE_RMSNORM, 8, choice)),
        )  # fmt: skip
        self.told: list[tuple[torch.Tensor, int, int, int]] = []

    def admits(self, op: Op, rows: int, hidden: int, dtype: torch.dtype) -> bool:
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def all_reduce_rmsnorm(self, x, residual, weight, eps, *, gemma=False):
        return x, residual

    def prefetch_in_next(self, chunks, first, count, ctas):
        self.told.append((chunks, first, count, ctas))

    def close(self) -> None:
        pass


@pytest.fixture
def model() -> Decoder:
    return Decoder()


@pytest.fixture
def attached(model: Decoder) -> prefetch.Prefetch:
    made = prefetch.Prefetch()
    made.attach(model, Limits(1 << 20, 1e3), torch.device("cpu"))
    return made


def told_bytes(communicator: Listening) -> list[set[tuple[int, int]]]:
    return [
        {(int(a), int(b)) for a, b in chunks[first : first + count]}
        for chunks, first, count, _ in communicator.told
    ]


def covered(ranges: set[tuple[int, int]]) -> set[int]:
    """Every 16 bytes that the ranges cover."""
    return {at for start, size in ranges for at in range(start, start + size, 16)}


def memory(*layers: nn.Linear) -> set[tuple[int, int]]:
    return {(x.weight.data_ptr(), x.weight.numel() * 4) for x in layers}


def test_each_norm_announces_what_is_read_after_it(model, attached):
    communicator = Listening(us=500.0)
    first, second = model.model.layers[0], model.model.layers[1]
    attached.before(first.post_attention_layernorm, communicator, 4)
    attached.before(second.input_layernorm, communicator, 4)
    ffn, attention = told_bytes(communicator)
    assert covered(ffn) == covered(memory(first.mlp.gate_up_proj, first.mlp.down_proj))
    expected = memory(second.self_attn.qkv_proj, second.self_attn.o_proj)
    assert covered(attention) == covered(expected)
    assert all(ctas == CTAS for *_, ctas in communicator.told)


def test_a_longer_wait_takes_more_and_no_known_wait_nothing(model, attached):
    norm = model.model.layers[0].post_attention_layernorm
    counts = []
    for us in (2.0, 60.0, 500.0):
        communicator = Listening(us)
        other = prefetch.Prefetch()
        other.attach(model, Limits(1 << 20, 1e3), torch.device("cpu"))
        other.before(norm, communicator, 4)
        counts.append(sum(size for told in told_bytes(communicator) for _, size in told))
    assert counts[0] < counts[1] < counts[2]
    unknown = Listening(us=500.0, source="pinned")
    attached.before(norm, unknown, 4)
    without = Listening()
    without.plan = None
    attached.before(norm, without, 3)
    beyond = Listening()
    attached.before(norm, beyond, 9)  # rows above the plan stay with SGLang
    assert not unknown.told and not without.told and not beyond.told


def test_other_norms_and_an_unattached_process_ask_for_nothing(attached):
    communicator = Listening(us=500.0)
    attached.before(nn.RMSNorm(HIDDEN), communicator, 4)
    prefetch.Prefetch().before(nn.RMSNorm(HIDDEN), communicator, 4)
    assert not communicator.told


def test_the_first_layers_input_norm_reads_no_sum(model, attached):
    communicator = Listening(us=500.0)
    attached.before(model.model.layers[0].input_layernorm, communicator, 4)
    assert not communicator.told


def test_the_fused_boundary_announces_before_it_sums(model, attached, monkeypatch):
    monkeypatch.setattr(fusion, "PREFETCH", attached)
    norm = model.model.layers[0].post_attention_layernorm
    norm.variance_epsilon = 1e-6
    communicator = Listening(us=500.0)
    order = []
    monkeypatch.setattr(communicator, "prefetch_in_next", lambda *_: order.append("prefetch"))
    monkeypatch.setattr(
        communicator,
        "all_reduce_rmsnorm",
        lambda x, r, *_, **__: order.append("sum") or (x, r),
    )
    adapter = Sm120AllReduce(communicator, None, torch.device("cpu"))
    boundary = fusion.FusedBoundary(types.SimpleNamespace(norm=norm))
    boundary._run(adapter, torch.zeros(4, HIDDEN), torch.zeros(4, HIDDEN))
    assert order == ["prefetch", "sum"]


def test_limits_are_the_devices():
    # RTX PRO 6000: 14 GHz GDDR7 on 512 bits is 1792 GB/s, 128 MiB of L2.
    gpu = types.SimpleNamespace(
        L2_cache_size=128 << 20, memory_clock_rate=14_000_000, memory_bus_width=512
    )
    limits = prefetch.limits_of(gpu)
    assert limits.bandwidth == pytest.approx(1.792e6)
    # 10 us: 9 of them at 80 % of that.
    assert limits.budget(10.0) == pytest.approx(12.9e6, rel=0.001)
    # Four ranks on it: what they fetch together fits, and takes as long.
    assert prefetch.limits_of(gpu, 4) == Limits(32 << 20, limits.bandwidth / 4)


@pytest.mark.parametrize(("shared", "sharing"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("draft", [False, True])
def test_the_models_weights_are_planned_once_they_are_loaded(
    model, monkeypatch, caplog, draft, shared, sharing
):
    made = prefetch.Prefetch()
    monkeypatch.setattr(prefetch, "PREFETCH", made)
    session = sessions.Session(Options(enabled=True, shared_gpu=shared), "cuda", 0)
    session.adapters = [Sm120AllReduce(Listening(), None, torch.device("cpu"))]
    monkeypatch.setattr(sessions, "_session", session)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    asked = []

    def limits_of(gpu, ranks):
        asked.append(ranks)
        return Limits(1 << 20, 1e3)

    monkeypatch.setattr(prefetch, "limits_of", limits_of)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    runner = types.SimpleNamespace(
        model_runner=types.SimpleNamespace(model=model, is_draft_worker=draft)
    )
    with caplog.at_level("INFO", logger="sglang_sm120"):
        prefetch.plan_weights(None, runner)
    assert (made.plan is None) == draft
    assert asked == ([] if draft else [sharing])
    expected = "" if draft else "weights after 5 sums, up to 0.0 MiB of 1 rows' 50.0 us"
    assert expected in caplog.text


def test_a_model_without_decoder_layers_is_left_alone(monkeypatch, caplog):
    with pytest.raises(PrefetchError):
        prefetch.Prefetch().attach(nn.Linear(2, 2), Limits(1, 1.0), torch.device("cpu"))


def test_the_target_is_the_one_we_know():
    (finding,) = [check_binding("prefetch", b) for b in prefetch.PART.bindings]
    assert finding.fits
