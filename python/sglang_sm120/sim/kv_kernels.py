"""Torch versions of the small Triton kernels that read, write and move places in the KV pool.

SGLang's request-to-token table says in which slot of the pool each token of each request lives; these functions fill
it, read runs of it, and move the entries themselves. The conventions are those of `kernels.py`.
"""

from __future__ import annotations

import ctypes

import torch

from sglang_sm120.sim.launch import refuse, replaces

_LOCS = "sglang.kernels.ops.speculative.cache_locs."


@replaces(_LOCS + "assign_draft_cache_locs_contiguous")
def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
    positions: torch.Tensor | None,
    mrope: torch.Tensor | None,
    BS: int,
    WRITE_POSITIONS: bool,
    WRITE_MROPE: bool,
) -> None:
    """Slots of each request's draft rows, right after its committed tokens; positions if asked for."""
    refuse("assign_draft_cache_locs_contiguous", WRITE_MROPE=WRITE_MROPE)
    batch, count = seq_lens.numel(), topk * speculative_num_steps
    where = seq_lens.long().view(-1, 1) + torch.arange(count, device=seq_lens.device)
    slots = req_to_token[req_pool_indices.long().view(-1, 1), where]
    out_cache_loc.view(-1)[: batch * count] = slots.view(-1).to(out_cache_loc.dtype)
    if WRITE_POSITIONS:
        assert positions is not None
        positions.view(-1)[: batch * topk] = seq_lens.repeat_interleave(topk).to(positions.dtype)


@replaces(_LOCS + "assign_extend_cache_locs")
def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    bs_upper: int,
    launch_grid: tuple[int, ...],
) -> None:
    """Slots of positions start..end-1 of each request, one request after another."""
    batch, at = launch_grid[0], 0
    rows = req_pool_indices[:batch].tolist()
    begins, ends = start_offset[:batch].tolist(), end_offset[:batch].tolist()
    for row, begin, end in zip(rows, begins, ends):
        slots = req_to_token[row, begin:end]
        out_cache_loc[at : at + end - begin] = slots.to(out_cache_loc.dtype)
        at += end - begin


@replaces(_LOCS + "generate_draft_decode_kv_indices")
def generate_draft_decode_kv_indices(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    positions: torch.Tensor,
    row_stride: int,
    kv_indices_stride: int,
    kv_indptr_stride: int,
    bs_upper: int,
    iter_upper: int,
    num_tokens_upper: int,
    page_size: int,
    window_size: int,
    sink_size: int,
    NUM_STEPS: int,
    ENTRY_PAGE_SIZE: int,
    v2p: torch.Tensor | None,
    TRANSLATE: bool,
    launch_grid: tuple[int, ...],
) -> None:
    """Slots each draft row attends to, for every draft step: the committed tokens, then its own branch."""
    refuse(
        "generate_draft_decode_kv_indices",
        window_size=window_size,
        NUM_STEPS=NUM_STEPS,
        TRANSLATE=TRANSLATE,
        ENTRY_PAGE_SIZE=ENTRY_PAGE_SIZE != 1,
        page_size_with_topk=page_size != 1 and launch_grid[2] != 1,
    )
    steps, batch, topk = launch_grid
    lengths = paged_kernel_lens[:batch].tolist()
    rows = req_pool_indices[:batch].tolist()
    branches = batch * topk
    sums = torch.zeros(branches + 1, dtype=torch.long)
    sums[1:] = positions[:branches].long().cumsum(0)
    numbers = torch.arange(branches + 1)
    for step in range(steps):
        new = step + 1
        parts = []
        for row, length in zip(rows, lengths):
            committed = req_to_token[row, :length]
            for branch in range(topk):
                begin = length + branch * steps
                parts += [committed, req_to_token[row, begin : begin + new]]
        flat = torch.cat(parts)
        kv_indices[step, : flat.numel()] = flat
        # The first entry is never written by the kernel either: it stays 0.
        kv_indptr[step, 1 : branches + 1] = (sums + numbers * new)[1:].to(kv_indptr.dtype)


@replaces("sglang.srt.mem_cache.allocation.assign_req_to_token_pool")
def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    bs_upper: int,
    launch_grid: tuple[int, ...],
) -> None:
    """Write freshly allocated slots into each request's positions start..end-1."""
    batch, at = launch_grid[0], 0
    rows = req_pool_indices[:batch].tolist()
    begins, ends = start_offset[:batch].tolist(), end_offset[:batch].tolist()
    for row, begin, end in zip(rows, begins, ends):
        slots = out_cache_loc[at : at + end - begin]
        req_to_token[row, begin:end] = slots.to(req_to_token.dtype)
        at += end - begin


@replaces("sglang.kernels.ops.attention.kv_indices.create_flashinfer_kv_indices_triton")
def create_kv_indices(
    req_to_token_ptr: torch.Tensor,
    req_pool_indices_ptr: torch.Tensor,
    page_kernel_lens_ptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_start_idx: torch.Tensor | None,
    kv_indices_ptr: torch.Tensor,
    req_to_token_ptr_stride: int,
    ENTRY_PAGE_SIZE: int,
    TOKEN_BLOCK_PARALLEL: bool,
    token_mapping: torch.Tensor | None,
    launch_grid: tuple[int, ...],
) -> None:
    """Slots of each request's tokens, one request after another."""
    refuse(
        "create_flashinfer_kv_indices_triton",
        ENTRY_PAGE_SIZE=ENTRY_PAGE_SIZE != 1,
        token_mapping=token_mapping is not None,
    )
    batch = launch_grid[0]
    rows, lengths = req_pool_indices_ptr[:batch].tolist(), page_kernel_lens_ptr[:batch].tolist()
    starts = kv_start_idx[:batch].tolist() if kv_start_idx is not None else [0] * batch
    outs = kv_indptr[:batch].tolist()
    for row, length, start, out in zip(rows, lengths, starts, outs):
        slots = req_to_token_ptr[row, start : start + length]
        kv_indices_ptr[out : out + length] = slots.to(kv_indices_ptr.dtype)


@replaces("sglang.kernels.ops.kvcache.cache_move.copy_all_layer_kv_cache_tiled")
def copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc_ptr: torch.Tensor,
    src_loc_ptr: torch.Tensor,
    num_locs: int,
    num_locs_upper: int,
    BYTES_PER_TILE: int,
) -> None:
    """Move KV entries between slots in every layer's buffers; sources are read before any target is written."""
    sources, targets = src_loc_ptr[:num_locs].tolist(), tgt_loc_ptr[:num_locs].tolist()
    for base, size in zip(data_ptrs.tolist(), strides.tolist()):
        held = [ctypes.string_at(base + slot * size, size) for slot in sources]
        for slot, value in zip(targets, held):
            ctypes.memmove(base + slot * size, value, size)


def extended_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Slots of positions start..end-1 of each request, one after another; SGLang asks the platform for this.

    Args:
        req_pool_indices: [batch] ints, row of each request in the table.
        req_to_token: [requests, positions] ints.
        start_offset: [batch] ints.
        end_offset: [batch] ints.
        batch_size: Requests.
        draft_token_num: Most tokens per request; sizes the result.
        device: Where the result lives.

    Returns:
        [batch_size * draft_token_num] int64; entries beyond the sum of the lengths are 0.
    """
    out = torch.zeros(batch_size * draft_token_num, dtype=torch.int64, device=device)
    assign_extend_cache_locs(
        req_pool_indices,
        req_to_token,
        start_offset,
        end_offset,
        out,
        req_to_token.shape[1],
        batch_size,
        (batch_size,),
    )
    return out
