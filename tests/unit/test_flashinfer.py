"""The FlashInfer backend over a FlashInfer made of torch: gates, joint refusals, dispatch, and what it computes.

The fakes take the calls that FlashInfer 0.7.2 and 0.7.4 take, by name, and sum over threads.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sglang_sm120.comm import factory, flashinfer, flashinfer_kernels
from sglang_sm120.comm.communicator import CollectiveError, Op
from sglang_sm120.comm.factory import Declined, GroupSpec, Peer
from sglang_sm120.comm.flashinfer import FlashInferCommunicator, Modules
from sglang_sm120.fabric import versions
from sglang_sm120.fabric.software import ThreadExchange, run_ranks
from sglang_sm120.options import Options

HIDDEN, EPS, BF16 = 256, 1e-5, torch.bfloat16
ALL = Modules(pcie=True, trtllm=True, norm=True)


@dataclass
class Fake:
    """What the fake FlashInfer was called with, and how it fails."""

    meet: ThreadExchange | None = None
    rank_of: Callable[[], int] = lambda: 0
    calls: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)  # part -> rank that fails

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        assert self.meet is not None
        return torch.stack(self.meet.of(self.rank_of())(x.clone())).float().sum(0).to(x.dtype)

    def note(self, what: str, **how: Any) -> None:
        self.calls.append((self.rank_of(), what, how))

    def fail(self, part: str) -> None:
        if self.broken.get(part) == self.rank_of():
            raise RuntimeError(f"{part}: cudaIpcOpenMemHandle failed with error 101")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    import threading

    state = Fake()
    here = threading.local()
    state.rank_of = lambda: getattr(here, "rank", 0)
    state.enter = lambda rank: setattr(here, "rank", rank)  # type: ignore[attr-defined]

    class Workspace:
        def __init__(self, group, max_numel, dtype=BF16, max_blocks=128, profile=None, **_):
            state.fail("pcie")
            state.note("pcie made", max_numel=max_numel, max_blocks=max_blocks, profile=profile)

        def all_reduce(self, inp, *, out=None, config=None, enable_pdl=False):
            state.note("pcie sum", config=config, shape=tuple(inp.shape))
            out.copy_(state.sum(inp))
            return out

        def rebind_stream(self) -> None:
            state.note("rebind")

        def destroy(self) -> None:
            state.note("pcie destroyed")

    @dataclass(frozen=True)
    class Config:
        blocks: int
        threads: int
        variant: int

    def create(rank, world, rows, hidden, use_fp32_lamport=False, group=None):
        state.fail("trtllm")
        pointers, _, _ = ar._alloc_symm_buffer_bytes(
            rows * hidden * 2 * world, world, None, None, "g"
        )
        state.note("trtllm made", rows=rows, hidden=hidden, pointers=pointers)
        return [pointers], "workspace"

    def fuse(**given: Any) -> None:
        state.note("trtllm", pattern=given["pattern_code"], bias=given.get("weight_bias"))
        assert given["use_oneshot"] and given["workspace_ptrs"] == "workspace"
        total = state.sum(given["allreduce_in"])
        if given["pattern_code"] == 0:
            given["allreduce_out"].copy_(total)
            return
        normed, residual = norm_of(
            total, given["residual_in"], given["rms_gamma"], given["rms_eps"], given["weight_bias"]
        )
        given["norm_out"].copy_(normed)
        given["residual_out"].copy_(residual)

    def in_place(bias: float) -> Callable[..., None]:
        def fused(x, residual, weight, eps=1e-6, enable_pdl=None):
            state.note("norm", bias=bias)
            normed, summed = norm_of(x, residual, weight, eps, bias)
            x.copy_(normed)
            residual.copy_(summed)

        return fused

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("torch's symmetric memory needs peer atomics")

    ar = module("flashinfer.comm.trtllm_ar", monkeypatch)
    ar._alloc_symm_buffer_bytes = never
    ar.trtllm_create_ipc_workspace_for_all_reduce_fusion = create
    ar.trtllm_allreduce_fusion = fuse
    ar.AllReduceFusionPattern = types.SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)
    pcie = module("flashinfer.comm.pcie_ipc_ar", monkeypatch)
    pcie.PcieIpcAllReduceWorkspace = Workspace
    policy = module("flashinfer.comm.pcie_ipc_policy", monkeypatch)
    policy.IpcLaunchConfig, policy.IpcVariant = Config, int
    ipc = module("flashinfer.comm.cuda_ipc", monkeypatch)
    ipc.create_shared_buffer = lambda nbytes, group=None: [nbytes, nbytes, nbytes, nbytes]
    ipc.free_shared_buffer = lambda pointers, group=None: state.note("freed")
    ipc.cudart = types.SimpleNamespace(cudaMemset=lambda *_: None)
    norm = module("flashinfer.norm", monkeypatch)
    norm.fused_add_rmsnorm, norm.gemma_fused_add_rmsnorm = in_place(0.0), in_place(1.0)
    root, comm = module("flashinfer", monkeypatch), module("flashinfer.comm", monkeypatch)
    root.comm, root.norm, comm.trtllm_ar = comm, norm, ar
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None: None)
    state.ar, state.never = ar, never  # type: ignore[attr-defined]
    return state


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def norm_of(total, residual, weight, eps, bias):
    summed = (total.float() + residual.float()).to(total.dtype)
    scale = weight.float() + (bias or 0.0)
    normed = summed.float() * torch.rsqrt(summed.float().pow(2).mean(-1, keepdim=True) + eps)
    return (normed * scale).to(total.dtype), summed


def group(
    fake: Fake, world: int, body: Callable[[FlashInferCommunicator, int], Any], **options: Any
) -> list[Any]:
    """Run `body` on every rank of a group whose FlashInfer is the fake."""
    fake.meet = ThreadExchange(world)
    exchange = ThreadExchange(world)

    def rank_body(rank: int) -> Any:
        fake.enter(rank)  # type: ignore[attr-defined]
        ours = FlashInferCommunicator(
            "tp", rank, world, None, exchange.of(rank), **{"modules": ALL, **options}
        )
        return body(ours, rank)

    return run_ranks(world, rank_body)


@pytest.mark.parametrize("version", ["0.6.16", "0.2.0", ""])
def test_c18_a_flashinfer_without_the_12x_kernels_is_refused_with_the_version_it_needs(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: versions.Versions(flashinfer=version))
    spec = GroupSpec("tp", 0, 2, "s", torch.device("cuda", 0), None, Options(), ())  # type: ignore[arg-type]
    for build in (flashinfer.build, flashinfer.build_compiled):
        with pytest.raises(Declined, match=r"0\.6\.17"):
            build(spec)


def test_builders_decline_what_flashinfer_has_no_kernel_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: versions.Versions(flashinfer="0.7.2"))
    cpu = GroupSpec("tp", 0, 2, "s", torch.device("cpu"), None, Options(), ())  # type: ignore[arg-type]
    three = GroupSpec("tp", 0, 3, "s", torch.device("cuda", 0), None, Options(), ())  # type: ignore[arg-type]
    with pytest.raises(Declined, match="computes on cpu"):
        flashinfer.build(cpu)
    with pytest.raises(Declined, match="2, 4, 8, 16 ranks, not 3"):
        flashinfer.build(three)
    monkeypatch.setattr(Modules, "found", classmethod(lambda cls: cls(False, False, True)))
    two = GroupSpec("tp", 0, 2, "s", torch.device("cuda", 0), None, Options(), ())  # type: ignore[arg-type]
    with pytest.raises(Declined, match="none of FlashInfer's all-reduce kernels is compiled"):
        flashinfer.build_compiled(two)


def test_the_factory_knows_the_backend_and_offers_it_beside_the_native_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for path in (factory.BACKENDS["flashinfer"], factory.EXTRAS["native"]["flashinfer"]):
        name, _, function = path.partition(":")
        assert callable(getattr(sys.modules[name], function))
    monkeypatch.setattr(versions, "installed", lambda: versions.Versions(flashinfer="0.7.4"))
    peers = tuple(Peer(r, r, "h", "m", "n", gpu="GPU-1") for r in range(2))
    spec = GroupSpec("tp", 0, 2, "s", torch.device("cuda", 0), None, Options(), peers)  # type: ignore[arg-type]
    ours = flashinfer.build(spec)
    assert isinstance(ours, FlashInferCommunicator) and ours._shared
    assert not ours.admits(Op.ALL_REDUCE, 4, HIDDEN, BF16), "no workspace before prepare"


def test_what_is_compiled_is_found_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def spec(compiled: bool) -> types.SimpleNamespace:
        def build() -> None:
            raise AssertionError("compiled")

        return types.SimpleNamespace(is_compiled=compiled, build_and_load=build)

    jit = module("flashinfer.jit.comm", monkeypatch)
    jit.gen_pcie_ipc_comm_module = lambda: spec(True)
    module("flashinfer.jit.norm", monkeypatch).gen_norm_module = lambda: spec(False)
    assert Modules.found() == Modules(pcie=True, trtllm=False, norm=False)
    assert Modules.common([ALL, Modules(True, False, True)]) == Modules(True, False, True)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("gemma", [False, True])
def test_every_way_sums_and_normalises_and_leaves_its_inputs_alone(
    fake: Fake, world: int, gemma: bool
) -> None:
    def body(ours: FlashInferCommunicator, rank: int) -> list[tuple[str, int]]:
        ours.prepare(HIDDEN, BF16, (1, 4, 16))
        ways = list(ours.ways(Op.ALL_REDUCE))
        parts = [torch.randn(4, HIDDEN, generator=seeded(r)).to(BF16) for r in range(world)]
        residual = torch.randn(4, HIDDEN, generator=seeded(99)).to(BF16)
        weight = torch.rand(HIDDEN, generator=seeded(7)).to(BF16)
        total = torch.stack(parts).float().sum(0).to(BF16)
        expected = norm_of(total, residual, weight, EPS, 1.0 if gemma else 0.0)
        for way in ways:
            for op in (Op.ALL_REDUCE, Op.ALL_REDUCE_RMSNORM):
                ours.choose(op, 4, HIDDEN, *way)
                assert ours.admits(op, 4, HIDDEN, BF16)
            x, kept = parts[rank].clone(), residual.clone()
            assert torch.equal(ours.all_reduce(x), total)
            for w in (weight, weight.float()):
                normed, summed = ours.all_reduce_rmsnorm(x, residual, w, EPS, gemma=gemma)
                assert torch.equal(summed, expected[1])
                assert torch.allclose(normed.float(), expected[0].float(), rtol=1e-2)
            assert torch.equal(residual, kept) and torch.equal(x, parts[rank])
        assert ours.calls[Op.ALL_REDUCE_RMSNORM] == 2 * len(ways)
        return ways

    ways = group(fake, world, body)[0]
    assert ("trtllm_one_shot", 0) in ways and len(ways) >= 3
    used = {(c["config"].variant, c["config"].blocks, c["config"].threads) for _, what, c in fake.calls if what == "pcie sum"}  # fmt: skip
    assert used == {(flashinfer_kernels.PCIE_VARIANTS[s], n, 256) for s, n in ways if s in flashinfer_kernels.PCIE_VARIANTS}  # fmt: skip
    assert {c["pattern"] for _, what, c in fake.calls if what == "trtllm"} == {0, 1}
    biases = {c["bias"] for _, what, c in fake.calls if what == "norm"}
    assert biases == {1.0 if gemma else 0.0}
    assert fake.ar._alloc_symm_buffer_bytes is fake.never, "put back"  # type: ignore[attr-defined]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("part, left", [("pcie", "trtllm_one_shot"), ("trtllm", "pcie_staged")])
def test_a_kernel_that_one_rank_cannot_set_up_is_left_out_by_all(
    fake: Fake, part: str, left: str
) -> None:
    fake.broken = {part: 1}

    def body(ours: FlashInferCommunicator, rank: int) -> tuple[set[str], dict[str, str]]:
        ours.prepare(HIDDEN, BF16, (8,))
        return {s for s, _ in ours.ways(Op.ALL_REDUCE)}, ours.left_out

    told = group(fake, 2, body)
    assert told[0] == told[1]
    names, why = told[0]
    assert left in names and not any(n.startswith(part) for n in names)
    assert "rank 1" in why[part] and "error 101" in why[part]


def test_without_any_kernel_every_rank_gets_the_same_error(fake: Fake) -> None:
    fake.broken = {"pcie": 0, "trtllm": 1}

    def body(ours: FlashInferCommunicator, rank: int) -> str:
        with pytest.raises(CollectiveError) as error:
            ours.prepare(HIDDEN, BF16, (8,))
        return str(error.value)

    texts = group(fake, 2, body)
    assert texts[0] == texts[1] and "rank 0" in texts[0] and "rank 1" in texts[0]


def test_a_kernel_that_only_some_ranks_have_compiled_is_used_by_none(fake: Fake) -> None:
    fake.meet, exchange = ThreadExchange(2), ThreadExchange(2)

    def body(rank: int) -> set[str]:
        fake.enter(rank)  # type: ignore[attr-defined]
        mine = Modules(pcie=True, trtllm=rank == 0, norm=True)
        ours = FlashInferCommunicator("tp", rank, 2, None, exchange.of(rank), modules=mine)
        ours.prepare(HIDDEN, BF16, (8,))
        return {s for s, _ in ours.ways(Op.ALL_REDUCE)}

    assert run_ranks(2, body) == [{"pcie_staged", "pcie_unstaged"}] * 2


def test_what_is_admitted_depends_on_shape_and_dtype_only(fake: Fake) -> None:
    def body(ours: FlashInferCommunicator, rank: int) -> None:
        ours.prepare(HIDDEN, BF16, (1, 64))
        ok = (Op.ALL_REDUCE, 64, HIDDEN, BF16)
        assert ours.admits(*ok) and ours.admits(Op.ALL_REDUCE_RMSNORM, 64, HIDDEN, torch.float16)
        for op, rows, hidden, dtype in (
            (Op.ALL_REDUCE, 65, HIDDEN, BF16),
            (Op.ALL_REDUCE, 0, HIDDEN, BF16),
            (Op.ALL_REDUCE, 4, HIDDEN + 1, BF16),
            (Op.ALL_REDUCE, 4, HIDDEN, torch.float32),
            (Op.ALL_REDUCE_RMSNORM_FP8, 4, HIDDEN, BF16),
        ):
            assert not ours.admits(op, rows, hidden, dtype)
        with pytest.raises(CollectiveError, match="does not serve"):
            ours.all_reduce(torch.zeros(65, HIDDEN, dtype=BF16))
        ours.close()
        ours.close()
        assert not ours.admits(*ok)

    group(fake, 2, body)
    assert not [c for c in fake.calls if c[1] == "freed"], "closing needs no other rank"


def test_ranks_that_share_a_gpu_keep_the_one_shot_kernel_within_what_is_resident(
    fake: Fake,
) -> None:
    def body(ours: FlashInferCommunicator, rank: int) -> None:
        ours.prepare(HIDDEN, BF16, (64,))
        for rows, fits in ((16, True), (17, False)):
            ours.choose(Op.ALL_REDUCE, rows, HIDDEN, "trtllm_one_shot")
            assert ours.admits(Op.ALL_REDUCE, rows, HIDDEN, BF16) is fits

    group(fake, 4, body, shared_gpu=True)


def test_a_wider_model_gets_wider_workspaces_and_the_old_ones_go(fake: Fake) -> None:
    def body(ours: FlashInferCommunicator, rank: int) -> None:
        ours.prepare(HIDDEN, BF16, (8,))
        ours.prepare(HIDDEN // 2, BF16, (8,))
        ours.prepare(HIDDEN * 2, BF16, (8,))

    group(fake, 2, body)
    made = [c["max_numel"] for r, what, c in fake.calls if r == 0 and what == "pcie made"]
    assert made == [8 * HIDDEN, 16 * HIDDEN]
    assert [w for r, w, _ in fake.calls if r == 0 and w in ("pcie destroyed", "freed")] == [
        "pcie destroyed",
        "freed",
    ]
