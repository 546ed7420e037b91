"""Torch versions of SGLang's Triton kernels: their effect, and that a changed kernel is noticed."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from sglang_sm120.sim import kernels, kv_kernels, launch, spec_tree  # noqa: E402


def run(function, **given):
    """Call a torch version with None for the kernel parameters that do not matter to it."""
    import inspect

    names = inspect.signature(function).parameters
    assert set(given) <= set(names)
    function(**{name: given.get(name) for name in names})


@pytest.fixture
def table():
    """req_to_token of 4 requests x 40 positions, every slot distinct."""
    draw = torch.Generator().manual_seed(1)
    return torch.randperm(160, generator=draw).view(4, 40).int()


def test_every_declared_kernel_exists_in_the_installed_sglang_with_these_parameters():
    pytest.importorskip("sglang", reason="SGLang is not installed")
    declared = launch.declared()
    assert len(declared) >= 12
    assert [text for text in map(launch.mismatch, declared) if text] == []


def test_a_changed_kernel_is_named_with_what_changed(monkeypatch):
    @triton.jit
    def kernel(a_ptr, b_ptr, fresh):
        pass

    monkeypatch.setattr(launch, "_IMPLEMENTATIONS", dict(launch.declared()))
    monkeypatch.setitem(globals(), "kernel", kernel)
    launch.replaces(f"{__name__}.kernel")(lambda a_ptr, b_ptr, old: None)
    assert launch.mismatch(f"{__name__}.kernel") == (
        f"SGLang's kernel {__name__}.kernel has other parameters (new: ['fresh'], gone: ['old'])"
    )
    launch.replaces(f"{__name__}.absent")(lambda: None)
    assert "does not exist" in launch.mismatch(f"{__name__}.absent")


def test_launches_reach_the_torch_version_and_unknown_kernels_are_named(monkeypatch):
    @triton.jit
    def known(out_ptr, value, BLOCK: triton.language.constexpr, extra=None):
        pass

    @triton.jit
    def unknown(out_ptr):
        pass

    def torch_version(out_ptr, value, BLOCK, extra, launch_grid):
        out_ptr.fill_(value * BLOCK * launch_grid[0])

    monkeypatch.setattr(launch.JITFunction, "run", launch.JITFunction.run)
    monkeypatch.setattr(launch, "_IMPLEMENTATIONS", {f"{__name__}.known": torch_version})
    launch.install()
    out = torch.zeros(2)
    known[(5,)](out, 3, BLOCK=2, num_warps=4)
    assert out.tolist() == [30, 30]
    known[lambda meta: (meta["BLOCK"],)](out, 1, BLOCK=2)
    assert out.tolist() == [4, 4]
    with pytest.raises(launch.MissingKernelError, match=rf"{__name__}.unknown .parameters out_ptr"):
        unknown[(1,)](out)


def test_chain_tree_equals_the_general_tree_with_one_branch(table):
    bonus, draft = torch.tensor([3, 4]), torch.tensor([[5, 6, 7], [8, 9, 10]])
    lengths, rows = torch.tensor([6, 11]), torch.tensor([2, 0])
    mask, tokens = torch.zeros(2 * 16, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    positions, slots = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long)
    retrieve = torch.zeros(3, 2, 4, dtype=torch.long)
    run(
        kernels.build_chain_tree, bonus=bonus, draft=draft, seq=lengths, mask=mask, positions=positions,
        retrieve=retrieve, tokens=tokens, BS=2, WIDTH=4, req_indices=rows, req_to_token=table,
        out_cache_loc=slots, WRITE_CACHE=True,
    )  # fmt: skip
    want_mask, want_positions = torch.ones(32, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    want = torch.full((3, 2, 4), -1)
    spec_tree.build_tree(
        torch.tensor([[-1, 0, 1], [-1, 0, 1]]), torch.tensor([[0, 1, 2], [0, 1, 2]]), lengths,
        want_mask, want_positions, *want, 1, 4, 4, full_mask=False,
    )  # fmt: skip
    assert torch.equal(mask, want_mask)
    assert torch.equal(positions, want_positions)
    assert torch.equal(retrieve, want)
    assert tokens.tolist() == [3, 5, 6, 7, 4, 8, 9, 10]
    assert slots.tolist() == [*table[2, 6:10].tolist(), *table[0, 11:15].tolist()]


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_rows_see_the_committed_tokens_and_their_own_branch(table, topk):
    steps, lengths, rows = 3, [4, 0, 9], [3, 1, 0]
    branches = len(rows) * topk
    indices = torch.full((steps, 200), -1)
    indptr = torch.zeros(steps, branches + 1, dtype=torch.int32)
    run(
        kv_kernels.generate_draft_decode_kv_indices,
        req_pool_indices=torch.tensor(rows), req_to_token=table, paged_kernel_lens=torch.tensor(lengths),
        kv_indices=indices, kv_indptr=indptr,
        positions=torch.tensor(lengths).repeat_interleave(topk),
        page_size=1, window_size=0, NUM_STEPS=0, ENTRY_PAGE_SIZE=1, TRANSLATE=False,
        launch_grid=(steps, len(rows), topk),
    )  # fmt: skip
    for step in range(steps):
        for number in range(branches):
            request, branch = divmod(number, topk)
            row, length = rows[request], lengths[request]
            own = table[row, length + branch * steps :][: step + 1]
            want = [*table[row, :length].tolist(), *own.tolist()]
            got = indices[step, indptr[step, number] : indptr[step, number + 1]]
            assert got.tolist() == want


def test_unsupported_options_of_a_kernel_are_refused_by_name(table):
    with pytest.raises(launch.MissingKernelError, match="does not support window_size"):
        run(
            kv_kernels.generate_draft_decode_kv_indices,
            window_size=8, ENTRY_PAGE_SIZE=1, page_size=1, launch_grid=(1, 1, 1),
        )  # fmt: skip


def test_split_argmax_finds_the_first_maximum_and_ignores_nan():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(2))
    logits[1, 7] = logits[1, 30] = 9.0
    logits[2, 3] = float("nan")
    values, places = torch.empty(5, 4), torch.empty(5, 4, dtype=torch.int32)
    run(
        kernels.draft_topk1_partial_argmax,
        logits=logits, partial_vals=values, partial_indices=places, vocab_size=50, num_splits=4, BLOCK=13,
    )  # fmt: skip
    p, index = torch.empty(5, 1), torch.empty(5, 1, dtype=torch.long)
    positions, drafts = torch.arange(5), torch.zeros(5, 3, dtype=torch.long)
    run(
        kernels.draft_topk1_finalize,
        partial_vals=values, partial_indices=places, topk_p=p, topk_index=index, positions=positions,
        draft_tokens=drafts, draft_token_column=1, WRITE_DRAFT_TOKEN=True,
    )  # fmt: skip
    want = logits.nan_to_num(-1e30).argmax(-1)
    assert index.flatten().tolist() == want.tolist() and index[1] == 7
    assert drafts[:, 1].tolist() == want.tolist() and (drafts[:, [0, 2]] == 0).all()
    assert positions.tolist() == [1, 2, 3, 4, 5] and (p == 1).all()


def test_commit_outputs_of_a_verify_pass():
    accept_lens, width = torch.tensor([3, 1], dtype=torch.int32), 4
    predict = torch.arange(100, 108, dtype=torch.int32)
    accept_index = torch.tensor([[0, 1, 3, -1], [4, -1, -1, -1]])
    new_lens, bonus = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.int32)
    last, select = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    correct, ids = torch.zeros(2, dtype=torch.int32), torch.zeros(8, dtype=torch.long)
    run(
        kernels.verify_commit_outputs,
        predict=predict, accept_index=accept_index, accept_lens=accept_lens,
        seq_lens=torch.tensor([10, 20]), new_seq_lens=new_lens, bonus=bonus, BS=2, PREDICT_SIZE=8,
        last_steps=last, correct=correct, select=select, ids=ids, DRAFT_WIDTH=width, TRACK_INTERVAL=0,
    )  # fmt: skip
    assert new_lens.tolist() == [13, 21]
    assert bonus.tolist() == [103, 104]
    assert last.tolist() == [3, 0]
    assert correct.tolist() == [2, 0] and select.tolist() == [2, 4]
    assert ids.tolist() == predict.tolist()


def test_draft_extend_lengths_and_positions():
    prefix, extend = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    post, start = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.int32)
    positions = torch.zeros(6, dtype=torch.long)
    run(
        kernels.prepare_draft_extend_lengths,
        seq_lens=torch.tensor([1, 8]), prefix_lens=prefix, extend_lens=extend, post_lens=post, BS=2,
        WIDTH=3, FRONT=0, positions=positions, start_locs=start, MAKE_POSITIONS=True,
    )  # fmt: skip
    assert prefix.tolist() == [1, 8] and extend.tolist() == [3, 3] and post.tolist() == [4, 11]
    assert start.tolist() == [0, 3] and positions.tolist() == [1, 2, 3, 8, 9, 10]
    run(
        kernels.prepare_draft_extend_lengths,
        seq_lens=torch.tensor([1, 8]), prefix_lens=prefix, extend_lens=extend, post_lens=post, BS=2,
        WIDTH=3, FRONT=2, MAKE_POSITIONS=False,
    )  # fmt: skip
    assert prefix.tolist() == [0, 6] and extend.tolist() == [5, 5]


def test_slots_of_drafts_and_of_extended_requests(table):
    out, positions = torch.zeros(12, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    run(
        kv_kernels.assign_draft_cache_locs_contiguous,
        req_pool_indices=torch.tensor([1, 3]), req_to_token=table, seq_lens=torch.tensor([5, 2]),
        out_cache_loc=out, topk=2, speculative_num_steps=3, positions=positions, WRITE_POSITIONS=True,
    )  # fmt: skip
    assert out.tolist() == [*table[1, 5:11].tolist(), *table[3, 2:8].tolist()]
    assert positions.tolist() == [5, 5, 2, 2]
    got = kv_kernels.extended_slots(
        req_pool_indices=torch.tensor([2, 0]), req_to_token=table, start_offset=torch.tensor([3, 7]),
        end_offset=torch.tensor([5, 11]), batch_size=2, draft_token_num=4, device="cpu",
    )  # fmt: skip
    assert got.tolist() == [*table[2, 3:5].tolist(), *table[0, 7:11].tolist(), 0, 0]


def test_new_slots_are_written_into_the_table(table):
    before = table.clone()
    run(
        kv_kernels.assign_req_to_token_pool,
        req_pool_indices=torch.tensor([2, 0]), req_to_token=table, start_offset=torch.tensor([3, 7]),
        end_offset=torch.tensor([5, 10]), out_cache_loc=torch.arange(900, 905), launch_grid=(2,),
    )  # fmt: skip
    before[2, 3:5] = torch.tensor([900, 901])
    before[0, 7:10] = torch.tensor([902, 903, 904])
    assert torch.equal(table, before)


def test_slots_of_whole_requests_with_and_without_a_start(table):
    out, indptr = torch.zeros(7, dtype=torch.long), torch.tensor([0, 3, 7])
    given = {
        "req_to_token_ptr": table, "req_pool_indices_ptr": torch.tensor([3, 0]),
        "page_kernel_lens_ptr": torch.tensor([3, 4]), "kv_indptr": indptr, "kv_indices_ptr": out,
        "ENTRY_PAGE_SIZE": 1, "launch_grid": (2,),
    }  # fmt: skip
    run(kv_kernels.create_kv_indices, **given)
    assert out.tolist() == [*table[3, :3].tolist(), *table[0, :4].tolist()]
    run(kv_kernels.create_kv_indices, kv_start_idx=torch.tensor([1, 6]), **given)
    assert out.tolist() == [*table[3, 1:4].tolist(), *table[0, 6:10].tolist()]


def test_kv_entries_move_in_every_layer_even_when_places_overlap():
    layers = [torch.arange(5 * width, dtype=torch.int16).view(5, width) for width in (2, 3)]
    before = [layer.clone() for layer in layers]
    source, target = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 4])
    run(
        kv_kernels.copy_all_layer_kv_cache,
        data_ptrs=torch.tensor([layer.data_ptr() for layer in layers]),
        strides=torch.tensor([layer.stride(0) * 2 for layer in layers]),
        tgt_loc_ptr=target, src_loc_ptr=source, num_locs=3,
    )  # fmt: skip
    for layer, old in zip(layers, before):
        old[target] = old[source]
        assert torch.equal(layer, old)


def test_bonus_tokens_accepted_slots_and_gathered_rows():
    bonus = torch.zeros(2, dtype=torch.int32)
    run(
        kernels.fill_bonus_tokens,
        accept_tokens=torch.tensor([[5, 6, 7], [8, 9, 10]]), accept_lens=torch.tensor([2, 3]),
        bonus_tokens_ptr=bonus, accept_stride=3,
    )  # fmt: skip
    assert bonus.tolist() == [6, 10]
    packed = torch.zeros(4, dtype=torch.long)
    run(
        kernels.fill_accept_out_cache_loc,
        accept_index=torch.tensor([[0, 2, -1], [3, -1, -1]]),
        out_cache_loc=torch.tensor([40, 41, 42, 43]), accept_out_cache_loc=packed,
    )  # fmt: skip
    assert packed.tolist() == [40, 42, 43, 0]
    sources = [torch.randn(6, 2), torch.arange(6), torch.randn(6, 3, 2), torch.randn(6, 1)]
    outs = [torch.zeros(2, *s.shape[1:], dtype=s.dtype) for s in sources]
    rows = torch.tensor([4, 1])
    given = {f"s{i}": s for i, s in enumerate(sources)} | {f"d{i}": d for i, d in enumerate(outs)}
    run(kernels.gather_rows, idx_ptr=rows, HAS3=False, **given)
    for source, out in zip(sources[:3], outs[:3]):
        assert torch.equal(out, source[rows])
    assert (outs[3] == 0).all()
