"""A broadcast of several small integer tensors as one sum: rank 0 contributes the values, the others zeros.

The sum is fp32, and each integer travels as two halves of 16 bits, which are exact in it whatever they are. On a GPU a
kernel packs them and another takes them out again; eight small torch kernels around the sum took longer than the
broadcasts that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_sm120.comm.communicator import Communicator, Op
from sglang_sm120.comm.cuda_library import cuda_library

ROW = 8  # elements; our kernels take rows of multiples of it
MOST = 4  # tensors in one sum, kMostShared of csrc/cuda/share.h


def share_from_rank_0(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> bool:
    """Give every rank rank 0's values.

    Args:
        communicator: one whose wire is lossless: INT8 rounds the values.
        tensors: at most 4 of int32, contiguous, of any shapes, which are the same on every rank; overwritten on the
            others.

    Returns:
        Whether it was done; False, on every rank alike, for other dtypes, for more tensors, and for sums that the
        communicator does not admit.

    Raises:
        CollectiveError: a rank did not take part.
    """
    unfit = any(t.dtype != torch.int32 or not t.is_contiguous() for t in tensors)
    if unfit or len(tensors) > MOST:
        return False
    halves = 2 * sum(t.numel() for t in tensors)
    width = -(-halves // ROW) * ROW
    if not halves or not communicator.admits(Op.ALL_REDUCE, 1, width, torch.float32):
        return False
    if tensors[0].is_cuda:
        _share_on_gpu(communicator, tensors, width)
    else:
        _share_on_cpu(communicator, tensors, width)
    return True


def _share_on_gpu(communicator: Communicator, tensors: Sequence[torch.Tensor], width: int) -> None:
    row = torch.empty(1, width, dtype=torch.float32, device=tensors[0].device)
    arrays = [number for t in tensors for number in (t.data_ptr(), t.numel())]
    library, stream = cuda_library(), torch.cuda.current_stream().cuda_stream
    library.cuda_share_pack(arrays, communicator.rank == 0, row, stream)
    library.cuda_share_unpack(communicator.all_reduce(row), arrays, stream)


def _share_on_cpu(communicator: Communicator, tensors: Sequence[torch.Tensor], width: int) -> None:
    row = torch.zeros(1, width, dtype=torch.float32)
    halves = 2 * sum(t.numel() for t in tensors)
    if communicator.rank == 0:
        row[0, :halves] = torch.cat([t.view(-1) for t in tensors]).view(torch.int16)
    values = communicator.all_reduce(row)[0, :halves].to(torch.int16).view(torch.int32)
    for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
