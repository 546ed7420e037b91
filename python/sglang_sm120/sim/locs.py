"""Where the KV entries of speculative tokens live, read from SGLang's request-to-token table."""

from __future__ import annotations

import torch


def assign_extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Slots of positions start..end-1 of each request, one after another.

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
    rows = req_pool_indices[:batch_size].tolist()
    begins, ends = start_offset[:batch_size].tolist(), end_offset[:batch_size].tolist()
    at = 0
    for row, begin, end in zip(rows, begins, ends):
        out[at : at + end - begin] = req_to_token[row, begin:end]
        at += end - begin
    return out
