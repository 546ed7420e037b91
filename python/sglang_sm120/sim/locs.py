"""Where the KV entries of speculative tokens live, read from SGLang's request-to-token table."""

from __future__ import annotations

import torch

from sglang_sm120.sim import kernels


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
    kernels.assign_extend_cache_locs(
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
