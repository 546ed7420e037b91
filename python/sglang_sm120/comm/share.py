"""A broadcast of several small integer tensors as one sum: rank 0 contributes the values, the others zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_sm120.comm.communicator import Communicator, Op

ROW = 8  # elements; our kernels take rows of multiples of it


def share_from_rank_0(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> bool:
    """Give every rank rank 0's values.

    Args:
        communicator: one whose wire is lossless: INT8 rounds the values.
        tensors: int32, contiguous, of any shapes, which are the same on every rank; overwritten on the others.

    Returns:
        Whether it was done; False, on every rank alike, for other dtypes and for sums that the communicator does
        not admit.

    Raises:
        CollectiveError: a rank did not take part.
    """
    if any(t.dtype != torch.int32 or not t.is_contiguous() for t in tensors):
        return False
    halves = 2 * sum(t.numel() for t in tensors)
    width = -(-halves // ROW) * ROW
    if not halves or not communicator.admits(Op.ALL_REDUCE, 1, width, torch.float32):
        return False
    row = torch.zeros(1, width, dtype=torch.float32, device=tensors[0].device)
    if communicator.rank == 0:
        # Halves of 16 bits are exact in fp32, whatever the integers are.
        row[0, :halves] = torch.cat([t.view(-1) for t in tensors]).view(torch.int16)
    values = communicator.all_reduce(row)[0, :halves].to(torch.int16).view(torch.int32)
    for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
    return True
