"""Which target token each position of a draft vocabulary stands for, as EAGLE-3 checkpoints store it.

`d2t[i]` is the target id of draft position i minus i; `t2d[t]` tells whether target token t has a position. Both are
absent when the drafter uses the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from sglang_sm120.foresight.checkpoint import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Mapping:
    """The target id of every draft position.

    Attributes:
        target_of: int64 [draft vocabulary], target ids.
        whole: every target token has its own position (no d2t in the checkpoint).
    """

    def __init__(self, target_of: torch.Tensor, whole: bool = False) -> None:
        self.target_of = target_of.to(torch.int64)
        self.whole = whole

    def __len__(self) -> int:
        return int(self.target_of.shape[0])

    @property
    def d2t(self) -> torch.Tensor:
        """As a checkpoint stores it: target id minus position, int64."""
        return self.target_of - torch.arange(len(self))

    def t2d(self, vocab: int) -> torch.Tensor:
        """As a checkpoint stores it: bool [vocab], true where a target token has a position."""
        have = torch.zeros(vocab, dtype=torch.bool)
        have[self.target_of] = True
        return have

    def positions(self) -> dict[int, int]:
        """Target id -> draft position (the last one when a target id occurs twice)."""
        return {t: i for i, t in enumerate(self.target_of.tolist())}


class Overlap(msgspec.Struct, frozen=True):
    """How two mappings compare: positions in both, of those how many mean the same token, tokens in both sets."""

    positions: int
    same_position: int
    shared_tokens: int


def overlap(one: Mapping, other: Mapping) -> Overlap:
    """Compare two mappings position by position and as sets of target tokens."""
    n = min(len(one), len(other))
    same = int((one.target_of[:n] == other.target_of[:n]).sum())
    shared = len(set(one.target_of.tolist()) & set(other.target_of.tolist()))
    return Overlap(positions=n, same_position=same, shared_tokens=shared)


def from_checkpoint(draft: Checkpoint) -> Mapping:
    """A drafter's mapping; the identity over its vocabulary when it stores no d2t.

    Raises:
        CheckpointError: d2t is not a vector of integers, or the vocabulary size is unknown.
    """
    name = draft.find("d2t")
    if name is None:
        size = draft.text_config.get("draft_vocab_size") or draft.text_config.get("vocab_size")
        if not size:
            raise CheckpointError(f"{draft.folder} has neither d2t nor a vocabulary size")
        return Mapping(torch.arange(int(size)), whole=True)
    return _from_d2t(draft.read(name), f"{draft.folder}: {name}")


def read(where: str | Path) -> Mapping:
    """A mapping from a drafter's folder, a `.safetensors` with d2t, a `.pt` list of target ids, or a `.json` of them.

    Raises:
        CheckpointError: nothing readable is there.
    """
    path = Path(where)
    if path.is_dir():
        return from_checkpoint(Checkpoint(path))
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = load_file(str(path))
        if "d2t" not in tensors:
            raise CheckpointError(f"{path} has no tensor d2t")
        return _from_d2t(tensors["d2t"], str(path))
    if path.suffix == ".pt":
        ids = torch.load(str(path), weights_only=True)
        return Mapping(torch.as_tensor(ids))
    if path.suffix == ".json":
        return Mapping(torch.tensor(msgspec.json.decode(path.read_bytes(), type=list[int])))
    raise CheckpointError(f"{path}: a mapping is a folder, .safetensors, .pt or .json")


def _from_d2t(d2t: torch.Tensor, name: str) -> Mapping:
    if d2t.ndim != 1 or d2t.is_floating_point():
        raise CheckpointError(f"{name} is {d2t.dtype} {list(d2t.shape)}, not a vector of integers")
    return Mapping(d2t.to(torch.int64) + torch.arange(d2t.shape[0]))


def coverage(mapping: Mapping, counts: dict[int, int]) -> tuple[float, list[tuple[int, int]]]:
    """Share of token occurrences that the mapping can draft, and the (id, count) it misses, most frequent first."""
    have = set(mapping.target_of.tolist())
    total = sum(counts.values())
    missing = sorted(
        ((t, n) for t, n in counts.items() if t not in have), key=lambda item: (-item[1], item[0])
    )
    covered = 1.0 - sum(n for _, n in missing) / total if total else 0.0
    return covered, missing


def count_tokens(ids: Sequence[int]) -> dict[int, int]:
    """Occurrences of each token id."""
    out: dict[int, int] = {}
    for i in ids:
        out[i] = out.get(i, 0) + 1
    return out
