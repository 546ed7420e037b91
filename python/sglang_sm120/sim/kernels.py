"""Torch versions of the small Triton kernels around EAGLE's drafting and verification.

Each function takes its kernel's parameters by name and writes the same outputs; strides and block sizes that only
shape a GPU launch are ignored. Options no server of this platform uses are refused, not guessed.
"""

from __future__ import annotations

import torch

from sglang_sm120.sim.launch import refuse, replaces

_EAGLE = "sglang.kernels.ops.speculative.eagle."
_TOPK1 = "sglang.kernels.ops.speculative.topk1."


@replaces(_EAGLE + "fill_bonus_tokens")
def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens_ptr: torch.Tensor,
    accept_stride: int,
) -> None:
    """The last accepted token of each request."""
    rows = torch.arange(accept_lens.numel(), device=accept_lens.device)
    last = accept_stride * rows + accept_lens.view(-1).long() - 1
    bonus_tokens_ptr[: rows.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens_ptr.dtype)


@replaces(_EAGLE + "fill_accept_out_cache_loc")
def fill_accept_out_cache_loc(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size_upper: int,
) -> None:
    """Slots of the accepted nodes, packed to the front in order."""
    nodes = accept_index.reshape(-1)
    kept = out_cache_loc[nodes[nodes > -1].long()]
    accept_out_cache_loc[: kept.numel()] = kept


@replaces(_EAGLE + "_verify_commit_outputs_kernel")
def verify_commit_outputs(
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    new_seq_lens: torch.Tensor,
    bonus: torch.Tensor,
    BS: int,
    PREDICT_SIZE: int,
    PREDICT_STRIDE: int,
    INDEX_STRIDE_0: int,
    INDEX_STRIDE_1: int,
    ACCEPT_STRIDE: int,
    SEQ_STRIDE: int,
    BLOCK: int,
    last_steps: torch.Tensor | None,
    track_steps: torch.Tensor | None,
    correct: torch.Tensor | None,
    select: torch.Tensor | None,
    ids: torch.Tensor | None,
    DRAFT_WIDTH: int,
    TRACK_INTERVAL: int,
) -> None:
    """New lengths and bonus tokens after a verify pass, and the inputs of the draft-extend that follows."""
    refuse("_verify_commit_outputs_kernel", TRACK_INTERVAL=TRACK_INTERVAL)
    rows = torch.arange(BS, device=accept_lens.device)
    accepted = accept_lens.long()
    node = accept_index[rows, accepted - 1].long()
    if DRAFT_WIDTH:
        assert last_steps is not None and correct is not None
        last_steps.copy_(node - rows * DRAFT_WIDTH)
        draft_extend_inputs(
            accept_lens,
            predict,
            correct,
            select,
            ids,
            BS,
            PREDICT_SIZE,
            DRAFT_WIDTH,
            ACCEPT_STRIDE,
            PREDICT_STRIDE,
            BLOCK,
        )
    bonus.copy_(predict[node])  # a node of -1 counts from the end, as in the kernel
    new_seq_lens.copy_(seq_lens.long() + accepted)


@replaces(_EAGLE + "_draft_extend_inputs_kernel")
def draft_extend_inputs(
    accept_lens: torch.Tensor,
    predict: torch.Tensor,
    correct: torch.Tensor | None,
    select: torch.Tensor | None,
    ids: torch.Tensor | None,
    BS: int,
    TOKENS: int,
    WIDTH: int,
    ACCEPT_STRIDE: int,
    PREDICT_STRIDE: int,
    BLOCK: int,
) -> None:
    """Accepted drafts, the row of each request's last accepted token, and the predicted ids."""
    assert correct is not None and select is not None and ids is not None
    accepted = accept_lens.long()
    correct.copy_(accepted - 1)
    select.copy_(torch.arange(BS, device=accept_lens.device) * WIDTH + accepted - 1)
    ids.copy_(predict)


@replaces(_EAGLE + "_prepare_draft_extend_lengths_kernel")
def prepare_draft_extend_lengths(
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    post_lens: torch.Tensor,
    BS: int,
    STRIDE: int,
    WIDTH: int,
    FRONT: int,
    BLOCK: int,
    positions: torch.Tensor | None,
    start_locs: torch.Tensor | None,
    mrope: torch.Tensor | None,
    MAKE_POSITIONS: bool,
    MAKE_MROPE: bool,
) -> None:
    """Prefix, new and total lengths of the draft-extend batch, and its positions if asked for."""
    refuse("_prepare_draft_extend_lengths_kernel", MAKE_MROPE=MAKE_MROPE)
    base = seq_lens.long()
    prefix = (base - FRONT).clamp_min(0)
    prefix_lens.copy_(prefix)
    extend_lens.fill_(WIDTH + FRONT)
    post_lens.copy_(base + WIDTH)
    if MAKE_POSITIONS:
        assert positions is not None and start_locs is not None
        start_locs.copy_(torch.arange(BS, device=base.device) * WIDTH)
        column = torch.arange(WIDTH, device=base.device)
        positions.copy_((prefix.unsqueeze(1) + column).view(-1))


@replaces(_EAGLE + "_build_chain_tree_kernel")
def build_chain_tree(
    bonus: torch.Tensor,
    draft: torch.Tensor,
    seq: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve: torch.Tensor,
    tokens: torch.Tensor,
    BS: int,
    WIDTH: int,
    BONUS_STRIDE: int,
    DRAFT_ROW: int,
    DRAFT_COL: int,
    SEQ_STRIDE: int,
    BLOCK: int,
    req_indices: torch.Tensor | None,
    req_to_token: torch.Tensor | None,
    out_cache_loc: torch.Tensor | None,
    mrope: torch.Tensor | None,
    REQ_STRIDE: int,
    TABLE_ROW: int,
    TABLE_COL: int,
    WRITE_CACHE: bool,
    WRITE_MROPE: bool,
) -> None:
    """A chain (topk 1) as a tree: tokens, positions, links, causal mask, and the slots of the new rows."""
    refuse("_build_chain_tree_kernel", WRITE_MROPE=WRITE_MROPE)
    tokens.copy_(
        torch.cat([bonus.view(-1, 1).to(tokens.dtype), draft.to(tokens.dtype)], 1).view(-1)
    )
    column = torch.arange(WIDTH, device=seq.device)
    where = seq.long().view(-1, 1) + column
    positions.copy_(where.view(-1))
    if WRITE_CACHE:
        assert req_indices is not None and req_to_token is not None and out_cache_loc is not None
        out_cache_loc.copy_(req_to_token[req_indices.long().view(-1, 1), where].view(-1))
    retrieve[0] = torch.arange(BS * WIDTH, device=seq.device).view(BS, WIDTH)
    retrieve[1] = torch.where(column + 1 < WIDTH, column + 1, -1)
    retrieve[2] = -1
    causal = torch.ones(WIDTH, WIDTH, dtype=mask.dtype, device=mask.device).tril()
    mask.view(-1)[: BS * WIDTH * WIDTH] = causal.expand(BS, WIDTH, WIDTH).reshape(-1)


@replaces(_TOPK1 + "_draft_topk1_partial_argmax_kernel")
def draft_topk1_partial_argmax(
    logits: torch.Tensor,
    partial_vals: torch.Tensor,
    partial_indices: torch.Tensor,
    logits_row_stride: int,
    vocab_size: int,
    num_splits: int,
    BLOCK: int,
) -> None:
    """Largest logit and its place, per slice of the vocabulary."""
    values = logits[:, :vocab_size].float()
    values = torch.where(values.isnan(), -1e30, values)
    for split in range(num_splits):
        best, place = values[:, split * BLOCK : (split + 1) * BLOCK].max(-1)
        partial_vals[:, split] = best
        partial_indices[:, split] = place + split * BLOCK


@replaces(_TOPK1 + "_draft_topk1_finalize_kernel")
def draft_topk1_finalize(
    partial_vals: torch.Tensor,
    partial_indices: torch.Tensor,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_tokens_stride: int,
    draft_token_column: int,
    num_splits: int,
    WRITE_DRAFT_TOKEN: bool,
    BLOCK: int,
) -> None:
    """The drafted token of each row; advances the positions."""
    split = partial_vals.argmax(-1, keepdim=True)
    index = partial_indices.gather(1, split).long()
    topk_index.copy_(index)
    topk_p.fill_(1.0)
    if WRITE_DRAFT_TOKEN:
        draft_tokens[:, draft_token_column] = index.view(-1)
    positions.add_(1)


@replaces("sglang.kernels.ops.speculative.gather_spec_extras._gather_rows_kernel")
def gather_rows(
    idx_ptr: torch.Tensor,
    s0: torch.Tensor,
    d0: torch.Tensor,
    n0: int,
    s1: torch.Tensor,
    d1: torch.Tensor,
    n1: int,
    s2: torch.Tensor,
    d2: torch.Tensor,
    n2: int,
    s3: torch.Tensor,
    d3: torch.Tensor,
    n3: int,
    HAS3: bool,
    BLOCK: int,
) -> None:
    """The same rows of up to four buffers."""
    rows = idx_ptr.long()
    d0.copy_(s0[rows])
    d1.copy_(s1[rows])
    d2.copy_(s2[rows])
    if HAS3:
        d3.copy_(s3[rows])
