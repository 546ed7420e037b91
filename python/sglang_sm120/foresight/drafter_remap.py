"""Rewrite a draft head for another draft vocabulary: every row moves to where its token now stands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors.torch import save_file

from sglang_sm120.foresight import mapping as vocabulary
from sglang_sm120.foresight.checkpoint import Checkpoint, CheckpointError
from sglang_sm120.foresight.mapping import Mapping

Fill = Literal["target", "mean"]


class Remap(msgspec.Struct, frozen=True):
    """What a remap did: rows that moved with their token, and target ids whose rows had no source."""

    rows: int
    moved: int
    without_source: tuple[int, ...]
    fill: Fill


def remap(draft: Checkpoint, new: Mapping, out: Path, *, target: Checkpoint | None = None) -> Remap:
    """Write a copy of `draft` whose head follows the mapping `new`.

    Row j of the new lm_head is the old row of the token that position j now stands for. Tokens that the old
    vocabulary lacks have no row to take: with `target` they get the target's own lm_head row, scaled to the draft
    head's mean norm; without, the mean of all draft rows, which never wins an argmax against a trained row.

    Args:
        draft: the drafter; new: the mapping wanted; out: an empty or new folder.
        target: where missing rows may come from.

    Raises:
        CheckpointError: `out` holds files, the drafter has no lm_head, the mapping repeats a token, or the
            target's head has another width.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty: give a new folder")
    name = draft.find("lm_head.weight")
    if name is None:
        raise CheckpointError(f"{draft.folder} has no lm_head.weight: it shares the target's head")
    if len(set(new.target_of.tolist())) != len(new):
        raise CheckpointError("the new mapping names a target token twice")
    old = vocabulary.from_checkpoint(draft)
    head = draft.read(name)
    if head.shape[0] != len(old):
        raise CheckpointError(
            f"{draft.folder}: lm_head has {head.shape[0]} rows, its mapping {len(old)} positions: nothing to go by"
        )
    at = old.positions()
    ids = new.target_of.tolist()
    missing = [t for t in ids if t not in at]
    rows = torch.empty((len(ids), head.shape[1]), dtype=head.dtype)
    have = [j for j, t in enumerate(ids) if t in at]
    rows[have] = head[[at[ids[j]] for j in have]]
    lack = [j for j, t in enumerate(ids) if t not in at]
    if lack:
        rows[lack] = _filling(head, target, [ids[j] for j in lack])
    _write(draft, name, rows, new, out)
    return Remap(
        rows=len(ids),
        moved=len(have),
        without_source=tuple(missing),
        fill="mean" if target is None else "target",
    )


def _filling(head: torch.Tensor, target: Checkpoint | None, ids: list[int]) -> torch.Tensor:
    if target is None:
        return head.float().mean(dim=0).to(head.dtype)
    name = target.find("lm_head.weight") or target.find("embed_tokens.weight")
    if name is None or target.shape(name)[1] != head.shape[1]:
        raise CheckpointError(f"{target.folder} has no head of width {head.shape[1]}")
    rows = target.rows(name, ids)
    scale = head.float().norm(dim=1).mean() / rows.norm(dim=1).mean().clamp_min(1e-12)
    return (rows * scale).to(head.dtype)


def _write(draft: Checkpoint, head: str, rows: torch.Tensor, new: Mapping, out: Path) -> None:
    """Copy the checkpoint, replacing head, d2t, t2d and the configuration's sizes."""
    out.mkdir(parents=True, exist_ok=True)
    vocab = int(draft.text_config["vocab_size"])
    tensors: dict[str, torch.Tensor] = {
        name: draft.read(name).contiguous() for name in draft.names if name != head
    }
    tensors[head] = rows
    tensors[draft.find("d2t") or "d2t"] = new.d2t
    tensors[draft.find("t2d") or "t2d"] = new.t2d(vocab)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = {**draft.config, "draft_vocab_size": len(new)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in draft.folder.iterdir():
        if (
            path.is_file()
            and path.suffix != ".safetensors"
            and not path.name.endswith((".index.json",))
            and path.name != "config.json"
        ):
            shutil.copy2(path, out / path.name)
