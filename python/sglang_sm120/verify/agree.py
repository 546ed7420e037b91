"""One cost table for all ranks: rank 0 measures and sends, everybody installs at the same pass.

Passes are counted alike on every rank of a tensor-parallel group, because each serves the same batches
in the same order. The message is begun at one pass and picked up some passes later, so nobody waits
for the network, and it carries rank 0's digest of all decisions so far: a rank that decided otherwise
finds out within one period instead of hanging in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from sglang_sm120.verify.cost import CostModel, CostTable
from sglang_sm120.verify.policy import DraftLengthPolicy

HEADER = 8
# Room for a table of about 700 cells; 8 candidates at 50 captured batch sizes are 450.
CAPACITY = 64 << 10


class PolicyDivergence(RuntimeError):
    """This rank chose other draft lengths, or saw other acceptance, than rank 0."""


class Update(msgspec.Struct, array_like=True):
    """What rank 0 sends: its pass count and decision digest then, and its table."""

    passes: int
    digest: int
    table: CostTable


class Link(Protocol):
    """Sends rank 0's bytes to all ranks."""

    rank: int

    def start(self, payload: bytes) -> Callable[[], bytes]:
        """Begin a broadcast; the returned call waits for it and gives rank 0's payload on every rank.

        Args:
            payload: what rank 0 sends; other ranks pass b"".
        """
        ...


class LocalLink:
    """A group of one rank."""

    rank = 0

    def start(self, payload: bytes) -> Callable[[], bytes]:
        return lambda: payload


class GroupLink:
    """Over a torch.distributed CPU group.

    Args:
        group: a process group that moves CPU tensors (gloo); calls must keep their order on all ranks.
        ranks: global ranks of the group, ascending.
    """

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        import torch.distributed

        self._dist = torch.distributed
        self._group = group
        self._source = ranks[0]
        self.rank = torch.distributed.get_rank(group)

    def start(self, payload: bytes) -> Callable[[], bytes]:
        import torch

        if len(payload) > CAPACITY - HEADER:
            raise ValueError(f"a cost table of {len(payload)} bytes does not fit {CAPACITY}")
        buffer = torch.zeros(CAPACITY, dtype=torch.uint8)
        if payload:
            framed = len(payload).to_bytes(HEADER, "little") + payload
            buffer[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        work = self._dist.broadcast(buffer, src=self._source, group=self._group, async_op=True)

        def finish() -> bytes:
            work.wait()
            raw = buffer.numpy()
            length = int.from_bytes(raw[:HEADER].tobytes(), "little")
            return raw[HEADER : HEADER + length].tobytes()

        return finish


class TableAgreement:
    """Keeps the policies of a group on one table.

    Args:
        policy: this rank's policy.
        model: the cost model; only rank 0's is read, other ranks may pass None.
        link: the group.
        period: passes between two tables; the first ones come after 8, 16, 32 ... passes.
        delay: passes between sending and installing.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        model: CostModel | None,
        link: Link,
        *,
        period: int = 64,
        delay: int = 4,
    ) -> None:
        if link.rank == 0 and model is None:
            raise ValueError("rank 0 needs a cost model to send")
        if not 0 < delay < 8 <= period:
            raise ValueError(f"delay {delay} must be below 8, and period {period} at least 8")
        self._policy = policy
        self._model = model
        self._link = link
        self._period = period
        self._delay = delay
        self._finish: Callable[[], bytes] | None = None
        self._due = 0
        self._digest_then = 0
        self.installed = 0

    def install_now(self) -> None:
        """Send and install rank 0's table at once, on every rank; before serving, since it waits.

        Raises:
            PolicyDivergence: as `after_pass`.
        """
        self._send(self._policy.passes)
        self._pick_up()

    def after_pass(self) -> None:
        """Call once after each reported pass, on every rank.

        Raises:
            PolicyDivergence: rank 0 had decided or seen something else when it sent the table.
        """
        passes = self._policy.passes
        if self._finish is not None and passes >= self._due:
            self._pick_up()
        if self._finish is None and self._sends_at(passes):
            self._send(passes)

    def _send(self, passes: int) -> None:
        payload = b""
        if self._link.rank == 0 and self._model is not None:
            update = Update(passes, self._policy.digest, self._model.table)
            payload = msgspec.msgpack.encode(update)
        self._digest_then = self._policy.digest
        self._due = passes + self._delay
        self._finish = self._link.start(payload)

    def _pick_up(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            self._install(finish())

    def _sends_at(self, passes: int) -> bool:
        if passes < self._period:
            return passes >= 8 and passes & (passes - 1) == 0
        return passes % self._period == 0

    def _install(self, data: bytes) -> None:
        update = msgspec.msgpack.decode(data, type=Update)
        sent_at = self._due - self._delay
        if (update.passes, update.digest) != (sent_at, self._digest_then):
            raise PolicyDivergence(
                f"rank {self._link.rank} differs from rank 0 in its draft lengths: digest "
                f"{self._digest_then:08x} after {sent_at} passes, rank 0 has {update.digest:08x} after "
                f"{update.passes}. Accepted counts must be equal on all ranks; start with "
                "--sm120-verify off and report the model and the backends"
            )
        self._policy.install(update.table)
        self.installed += 1
