"""Device memory of one NCCL communicator, from NCCL's own allocation rule.

Source: NVIDIA/nccl 2.30.7, `src/transport/p2p.cc` (`p2pSendSetup`, `p2pRecvSetup`: one `ncclRecvMem` and the
buffers of all three protocols on the receiving side, one `ncclSendMem` on the sending side, each rounded up to
`CUDA_IPC_MIN` = 2 MiB), `src/init.cc` (`computeBuffSizes`: the defaults), `src/include/device.h` (line counts).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

KIB = 1024
MIB = 1024 * KIB
CUDA_IPC_MIN = 2 * MIB
RECV_MEM = 4 * KIB  # sizeof(struct ncclRecvMem), one page
SEND_MEM = 4 * KIB  # sizeof(struct ncclSendMem), one page
STEPS = 8  # NCCL_STEPS
LL_DEFAULT = (
    8 * 512 * STEPS * 16
)  # lines per thread, threads, steps, sizeof(ncclLLFifoLine) = 512 KiB
LL128_DEFAULT = 120 * 640 * STEPS * 8  # elements per thread, threads, steps, 8 bytes = 4.6875 MiB
SIMPLE_DEFAULT = 4 * MIB


class Buffers(msgspec.Struct, frozen=True):
    """Bytes of each protocol's buffer in one channel."""

    ll: int = LL_DEFAULT
    ll128: int = LL128_DEFAULT
    simple: int = SIMPLE_DEFAULT

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Buffers:
        """The sizes that NCCL will read from `environ`; unreadable or non-positive values count as unset."""

        def read(name: str, default: int) -> int:
            text = environ.get(name, "")
            return int(text) if text.isdigit() and int(text) > 0 else default

        return cls(
            ll=read("NCCL_LL_BUFFSIZE", LL_DEFAULT),
            ll128=read("NCCL_LL128_BUFFSIZE", LL128_DEFAULT),
            simple=read("NCCL_BUFFSIZE", SIMPLE_DEFAULT),
        )


def _round(size: int) -> int:
    return -(-size // CUDA_IPC_MIN) * CUDA_IPC_MIN


def channel_bytes(buffers: Buffers) -> int:
    """Device bytes per GPU of one ring channel: receiving side plus sending side."""
    receive = _round(RECV_MEM + buffers.ll + buffers.ll128 + buffers.simple)
    return receive + _round(SEND_MEM)


def communicator_bytes(channels: int, buffers: Buffers | None = None, *, tree: bool = False) -> int:
    """Device bytes per GPU of one communicator with `channels` ring channels over peer-to-peer.

    `tree` adds the connections of the tree algorithm; NCCL makes them at first use only (NCCL_RUNTIME_CONNECT).
    """
    if channels < 1:
        raise ValueError(f"a communicator has at least one channel, not {channels}")
    return channels * channel_bytes(buffers or Buffers()) * (2 if tree else 1)
