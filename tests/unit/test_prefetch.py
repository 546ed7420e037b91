"""The prefetch planner on tiny models: right weights, right order, right bytes, never outside a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_sm120.verify.prefetch import (
    ALIGNMENT,
    CHUNK,
    Limits,
    PrefetchError,
    PrefetchPlan,
    Range,
    boundaries,
    chunks_of,
    plan_for,
    ranges_of,
    tensor_range,
    tensors_of,
)
from torch import nn

HIDDEN = 64


def lin(out: int, inp: int = HIDDEN) -> nn.Linear:
    return nn.Linear(inp, out, bias=False)


class Marlin(nn.Module):
    """INT4 packed into int32, scales and zero points, as parameters and buffers."""

    def __init__(self, out: int, inp: int = HIDDEN) -> None:
        super().__init__()
        self.qweight = nn.Parameter(
            torch.zeros(inp // 16, out * 2, dtype=torch.int32), requires_grad=False
        )
        self.scales = nn.Parameter(
            torch.zeros(inp // 32, out, dtype=torch.bfloat16), requires_grad=False
        )
        self.register_buffer("qzeros", torch.zeros(inp // 32, out // 8, dtype=torch.int32))


class Fp8(nn.Module):
    """FP8 kept transposed, as SGLang keeps it for its GEMMs."""

    def __init__(self, out: int, inp: int = HIDDEN) -> None:
        super().__init__()
        stored = torch.zeros(out, inp, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(stored.t(), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.ones(1), requires_grad=False)


class Nvfp4(nn.Module):
    def __init__(self, out: int, inp: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(out, inp // 2, dtype=torch.uint8), requires_grad=False
        )
        self.weight_scale = nn.Parameter(
            torch.zeros(out, inp // 16, dtype=torch.float8_e4m3fn), requires_grad=False
        )


class Mla(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused_qkv_a_proj_with_mqa = lin(48)
        self.q_b_proj = Fp8(96)
        self.kv_b_proj = lin(128)
        self.o_proj = Marlin(64)
        # Absorbed weights are plain attributes in SGLang, not parameters.
        self.w_kc = torch.zeros(4, 16, 16, dtype=torch.bfloat16)
        self.w_vc = torch.zeros(4, 16, 32, dtype=torch.bfloat16).transpose(1, 2)
        self.w_scale = 1.0
        self.rotary_emb = nn.Identity()


class Gqa(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = lin(96)
        self.o_proj = lin(64)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = lin(128)
        self.down_proj = lin(64)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(8, 64, 64))


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = lin(8)
        self.experts = Experts()
        self.shared_experts = nn.ModuleDict({"gate_up_proj": Nvfp4(64), "down_proj": Nvfp4(64)})


class Layer(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = nn.LayerNorm(HIDDEN)


class Body(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.embed_tokens = nn.Embedding(100, HIDDEN)


class Wrapped(nn.Module):
    """Kimi-like: a vision wrapper around a language model around a body."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.language_model = nn.Module()
        self.language_model.model = Body(layers)
        self.language_model.lm_head = lin(100)


def deepseek() -> Wrapped:
    return Wrapped([Layer(Mla(), Dense()), Layer(Mla(), Moe()), Layer(Mla(), Moe())])


ROOMY = Limits(l2_bytes=1 << 30, bandwidth=1.7e6)


def covers(ranges, tensor: torch.Tensor) -> bool:
    want = tensor_range(tensor)
    return any(r.pointer <= want.pointer and want.end <= r.end for r in ranges)


def test_each_sum_is_followed_by_what_is_read_next():
    model = deepseek()
    found = boundaries(model)
    layers = model.language_model.model.layers
    assert [(b.layer, b.place) for b in found] == [
        (0, "attention"), (0, "ffn"), (1, "attention"), (1, "ffn"), (2, "attention"), (2, "ffn"),
    ]  # fmt: skip
    assert found[0].parts == ("mlp.gate_up_proj", "mlp.down_proj")
    assert found[2].parts == ("mlp.gate", "mlp.shared_experts")
    assert found[1].parts == (
        "self_attn.fused_qkv_a_proj_with_mqa",
        "self_attn.q_b_proj",
        "self_attn.w_kc",
        "self_attn.w_vc",
        "self_attn.o_proj",
    )
    assert covers(found[1].ranges, layers[1].self_attn.q_b_proj.weight)
    assert covers(found[3].ranges, layers[2].self_attn.w_kc)
    assert not covers(found[1].ranges, layers[1].self_attn.kv_b_proj.weight), "absorbed, not read"
    assert not covers(found[2].ranges, layers[1].mlp.experts.w13_weight), "not known before routing"
    assert found[5].ranges == (), "the head is read once and larger than L2"


def test_llama_like_models_are_walked_too():
    model = Body([Layer(Gqa(), Dense()) for _ in range(2)])
    found = boundaries(model)
    assert found[1].parts == ("self_attn.qkv_proj", "self_attn.o_proj")
    expected = sum(p.numel() * 4 for p in model.layers[1].self_attn.parameters())
    assert found[1].bytes == expected


def test_bytes_of_packed_layouts_are_exact():
    for module in (Marlin(64), Fp8(96), Nvfp4(64)):
        held = [*module.parameters(), *module.buffers()]
        exact = sum(t.numel() * t.element_size() for t in held)
        assert sum(r.bytes for r in ranges_of(tensors_of(module))) == exact


def test_a_transposed_view_is_its_storage():
    stored = torch.zeros(32, 64, dtype=torch.uint8)
    assert tensor_range(stored.t()) == Range(stored.data_ptr(), 2048)
    assert tensor_range(stored[4:6, 8:16]) == Range(stored.data_ptr() + 4 * 64 + 8, 64 + 8)
    assert tensor_range(stored[:0]).bytes == 0


def test_shared_and_overlapping_tensors_are_listed_once():
    base = torch.zeros(4096, dtype=torch.uint8)
    assert ranges_of([base[:1024], base[512:2048], base[:256]]) == [Range(base.data_ptr(), 2048)]
    tied = [base[100:200], base[100:200]]
    assert sum(r.bytes for r in ranges_of(tied)) == 100


def test_budget_follows_wait_bandwidth_and_l2():
    limits = Limits(l2_bytes=128 << 20, bandwidth=1.6e6, l2_share=0.5, bandwidth_share=0.5)
    assert limits.budget(0.5) == 0
    assert limits.budget(11.0) == pytest.approx(8e6)
    assert limits.budget(1e6) == 64 << 20
    for bad in ({"l2_bytes": 0}, {"bandwidth": 0.0}, {"l2_share": 1.5}, {"bandwidth_share": 0.0}):
        with pytest.raises(PrefetchError):
            Limits(**({"l2_bytes": 1 << 20, "bandwidth": 1e6} | bad))


def test_a_shorter_wait_loads_a_prefix():
    model = Body([Layer(Gqa(), Dense()) for _ in range(3)])
    plan = plan_for(model, Limits(l2_bytes=1 << 20, bandwidth=1e4, floor_us=0.0))
    attention = plan.index(1, "ffn")
    loaded = [plan.bytes_at(attention, wait) for wait in (0.0, 2.5, 5.0, 1000.0)]
    assert loaded[0] == 0 and loaded == sorted(loaded)
    assert loaded[-1] == plan.boundaries[attention].bytes
    for wait in (2.5, 5.0):
        assert plan.bytes_at(attention, wait) <= plan.limits.budget(wait)
    first, count = plan.window(attention, 1000.0)
    rows = plan.array()[first : first + count]
    qkv = tensor_range(model.layers[2].self_attn.qkv_proj.weight)
    assert rows[0, 0] >= qkv.pointer and rows[0, 0] < qkv.pointer + ALIGNMENT


def test_l2_share_limits_what_the_array_holds():
    model = Body([Layer(Gqa(), Dense()) for _ in range(2)])
    plan = plan_for(model, Limits(l2_bytes=32 << 10, bandwidth=1e6))
    for boundary in range(len(plan.boundaries)):
        assert plan.bytes_at(boundary, 1e9) <= 16 << 10
        assert plan.window(boundary, 0.0)[1] == 0


def test_array_is_what_a_kernel_can_take():
    plan = plan_for(deepseek(), ROOMY)
    array = plan.array()
    assert array.dtype == torch.int64 and array.shape[1] == 2 and array.is_contiguous()
    assert (array % ALIGNMENT == 0).all()
    assert (array[:, 1] > 0).all() and (array[:, 1] <= CHUNK).all()
    spans = sorted((int(p), int(p + n)) for p, n in array)
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])), "loaded twice"


def test_an_unknown_boundary_is_refused():
    with pytest.raises(KeyError, match="no boundary ffn of layer 9"):
        plan_for(deepseek(), ROOMY).index(9, "ffn")


def test_models_without_layers_are_refused():
    with pytest.raises(PrefetchError, match="no decoder layers"):
        boundaries(nn.Linear(2, 2))


@given(
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 100_000)), max_size=12),
    st.integers(1, 1 << 18),
)
def test_chunks_stay_inside_and_lose_less_than_the_alignment(spans, l2):
    ranges = [Range(p, n) for p, n in spans]
    chunks = chunks_of(ranges)
    for c in chunks:
        assert c.pointer % ALIGNMENT == 0 and c.bytes % ALIGNMENT == 0
        assert any(r.pointer <= c.pointer and c.end <= r.end for r in ranges)
    lost = sum(r.bytes for r in ranges) - sum(c.bytes for c in chunks)
    assert 0 <= lost < 2 * ALIGNMENT * max(1, len(ranges))
    from sglang_sm120.verify.prefetch import Boundary

    plan = PrefetchPlan([Boundary(0, "ffn", (), tuple(ranges))], Limits(l2, 1e6))
    assert plan.bytes_at(0, 1e9) <= l2 // 2
