"""Will this EAGLE-3 drafter work with this target? Configurations, headers, and the few tensors that tell.

What costs days when it is wrong and shows nowhere: hidden states of the wrong width or layers, a tokenizer that
numbers tokens differently, and a draft vocabulary whose positions stand for other tokens than the head was trained
for. Every finding says what it saw and what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from sglang_sm120.foresight import mapping as vocabulary
from sglang_sm120.foresight.checkpoint import Checkpoint
from sglang_sm120.foresight.mapping import Mapping

Level = Literal["ok", "note", "warning", "error"]

# Rows of the heads that are compared: enough that the mean cosine of unrelated rows stays below 0.05.
SAMPLE = 512


class Finding(msgspec.Struct, frozen=True):
    """One thing that was checked: its level, a short name, what was seen, and what to do about it."""

    level: Level
    name: str
    text: str
    remedy: str = ""


class Check(msgspec.Struct, frozen=True):
    """All findings; `fits` when none is an error."""

    findings: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        """Whether the drafter can be expected to work."""
        return all(f.level != "error" for f in self.findings)


def check(
    target: Checkpoint,
    draft: Checkpoint,
    *,
    against: Mapping | None = None,
    counts: dict[int, int] | None = None,
) -> Check:
    """Run every check.

    Args:
        target, draft: the two checkpoints.
        against: another drafter's mapping to compare positions with.
        counts: token id -> occurrences in text that the target writes, for coverage.

    Raises:
        CheckpointError: a file is damaged or a tensor that the configuration promises is missing.
    """
    out: list[Finding] = []
    out += _widths(target, draft)
    out += _aux_layers(target, draft)
    mapping = vocabulary.from_checkpoint(draft)
    out += _mapping(target, draft, mapping)
    out += _head(target, draft, mapping, against)
    out += _tokenizers(target, draft)
    if counts is not None:
        out += _coverage(mapping, counts)
    if against is not None:
        out += _against(mapping, against)
    return Check(tuple(out))


def _widths(target: Checkpoint, draft: Checkpoint) -> list[Finding]:
    wide = target.text_config.get("hidden_size")
    claimed = draft.text_config.get("target_hidden_size", draft.text_config.get("hidden_size"))
    if wide != claimed:
        return [
            Finding(
                "error",
                "hidden size",
                f"target {wide}, drafter was made for {claimed}",
                "this drafter belongs to another target",
            )
        ]
    return [Finding("ok", "hidden size", f"{wide} in both")]


def _aux_layers(target: Checkpoint, draft: Checkpoint) -> list[Finding]:
    depth = int(target.text_config.get("num_hidden_layers", 0))
    wide = int(target.text_config.get("hidden_size", 0))
    eagle = draft.config.get("eagle_config") or {}
    ids: Sequence[int] | None = eagle.get(
        "eagle_aux_hidden_state_layer_ids", draft.config.get("eagle_aux_hidden_state_layer_ids")
    )
    fused = draft.find("fc.weight")
    if fused is None:
        return [
            Finding(
                "error",
                "aux layers",
                "the drafter has no fc.weight: it is not an EAGLE-3 head",
                "serve it with the algorithm it was trained for",
            )
        ]
    states = draft.shape(fused)[1] / wide if wide else 0.0
    out: list[Finding] = []
    if ids is None:
        # SGLang's default: [2, n // 2, n - 3].
        ids = [2, depth // 2, depth - 3]
        out.append(
            Finding(
                "warning",
                "aux layers",
                f"the drafter does not say which layers feed it; SGLang will take {list(ids)}",
                "write eagle_config.eagle_aux_hidden_state_layer_ids into the drafter's config.json",
            )
        )
    if states != len(ids):
        out.append(
            Finding(
                "error",
                "aux layers",
                f"fc.weight takes {states:g} hidden states, the configuration names {len(ids)} layers",
                "list as many layers as the drafter was trained with",
            )
        )
    if any(not 0 <= i <= depth for i in ids) or len(set(ids)) < len(ids):
        out.append(
            Finding(
                "error",
                "aux layers",
                f"layers {list(ids)} of a target with {depth} layers: out of range or repeated",
                "use the layer numbers of training",
            )
        )
    if not out:
        out.append(Finding("ok", "aux layers", f"{list(ids)} of {depth}, fc takes {len(ids)}"))
    return out


def _mapping(target: Checkpoint, draft: Checkpoint, mapping: Mapping) -> list[Finding]:
    vocab = int(target.text_config.get("vocab_size", 0))
    out: list[Finding] = []
    head = draft.find("lm_head.weight")
    rows = draft.shape(head)[0] if head else None
    if rows is not None and rows != len(mapping):
        out.append(
            Finding(
                "error",
                "draft vocabulary",
                f"lm_head has {rows} rows, the mapping {len(mapping)} positions",
                "head and d2t are from different drafters: see `drafter remap`",
            )
        )
    said = draft.text_config.get("draft_vocab_size")
    if said is not None and int(said) != len(mapping):
        out.append(
            Finding(
                "error",
                "draft vocabulary",
                f"config.json says draft_vocab_size {said}, d2t has {len(mapping)} positions",
                "correct config.json",
            )
        )
    ids = mapping.target_of
    outside = int(((ids < 0) | (ids >= vocab)).sum())
    twice = len(mapping) - len(set(ids.tolist()))
    name = draft.find("t2d")
    t2d = draft.read(name).bool() if name else None
    if outside or twice:
        text = (
            f"{outside} positions map outside the target's {vocab} tokens, {twice} repeat a token"
        )
        remedy = "the mapping is damaged or belongs to another target"
        raw = mapping.d2t
        inside = bool(((raw >= 0) & (raw < vocab)).all()) and len(set(raw.tolist())) == len(raw)
        if inside:
            text += "; read as plain target ids d2t would be sound"
            remedy = (
                "d2t must store target id minus position: subtract arange(len(d2t)) and save again"
            )
        out.append(Finding("error", "d2t", text, remedy))
    elif t2d is not None:
        if t2d.shape[0] != vocab:
            out.append(
                Finding(
                    "error",
                    "t2d",
                    f"t2d has {t2d.shape[0]} entries, the target {vocab} tokens",
                    "t2d belongs to another target",
                )
            )
        else:
            wrong = int((t2d != mapping.t2d(vocab)).sum())
            if wrong:
                out.append(
                    Finding(
                        "error",
                        "t2d",
                        f"t2d and d2t disagree about {wrong} tokens",
                        "save both from one list of target ids",
                    )
                )
    if not out:
        kind = (
            f"all {len(mapping)} tokens, no mapping"
            if mapping.whole
            else f"{len(mapping)} of {vocab} tokens, d2t {'and t2d agree' if name else 'is sound'}"
        )
        out.append(Finding("ok", "draft vocabulary", kind))
    return out


def _head(
    target: Checkpoint, draft: Checkpoint, mapping: Mapping, against: Mapping | None
) -> list[Finding]:
    """Do the rows of the draft head resemble the target's rows of the tokens they are mapped to?"""
    mine = draft.find("lm_head.weight")
    theirs = target.find("lm_head.weight") or target.find("embed_tokens.weight")
    if mine is None or theirs is None:
        return [
            Finding("note", "head rows", "one of the two has no lm_head of its own: not compared")
        ]
    if draft.shape(mine)[1] != target.shape(theirs)[1]:
        return []
    rows = min(draft.shape(mine)[0], len(mapping))
    vocab = target.shape(theirs)[0]
    sample = torch.linspace(0, rows - 1, min(SAMPLE, rows)).long().tolist()
    own = _cosine(target, theirs, vocab, draft, mine, sample, mapping)
    shuffled = Mapping(mapping.target_of.roll(max(1, rows // 3)))
    chance = _cosine(target, theirs, vocab, draft, mine, sample, shuffled)
    text = f"mean cosine of draft and target rows {own:.2f} as mapped, {chance:.2f} by chance"
    if against is not None:
        both = [i for i in sample if i < len(against)]
        other = _cosine(target, theirs, vocab, draft, mine, both, against)
        text += f", {other:.2f} with the other drafter's mapping"
        if other > own + 0.1 and other > chance + 0.1:
            return [
                Finding(
                    "error",
                    "head rows",
                    text + ": the head was trained for the other mapping",
                    "use the other drafter's d2t and t2d, or `drafter remap` this head",
                )
            ]
    if own > chance + 0.1:
        return [Finding("ok", "head rows", text)]
    return [
        Finding(
            "warning",
            "head rows",
            text + ": the rows do not show that they belong to these tokens",
            "a head trained from scratch may look like this; `drafter measure` decides",
        )
    ]


def _cosine(
    target: Checkpoint,
    theirs: str,
    vocab: int,
    draft: Checkpoint,
    mine: str,
    sample: Sequence[int],
    mapping: Mapping,
) -> float:
    pairs = [(i, int(mapping.target_of[i])) for i in sample]
    pairs = [(i, t) for i, t in pairs if 0 <= t < vocab]
    if not pairs:
        return 0.0
    a = draft.rows(mine, [i for i, _ in pairs])
    b = target.rows(theirs, [t for _, t in pairs])
    # The rows' common direction says nothing about which token they are.
    a, b = a - a.mean(dim=0), b - b.mean(dim=0)
    return float(torch.nn.functional.cosine_similarity(a, b, dim=1).mean())


def _tokenizers(target: Checkpoint, draft: Checkpoint) -> list[Finding]:
    vocab = target.text_config.get("vocab_size")
    said = draft.text_config.get("vocab_size")
    out: list[Finding] = []
    if said is not None and said != vocab:
        out.append(
            Finding(
                "error",
                "vocabulary size",
                f"target {vocab}, drafter was made for {said}",
                "another tokenizer: retrain, or map the tokens by hand",
            )
        )
    a, b = (read_vocabulary(c.folder) for c in (target, draft))
    if a is not None and b is not None:
        other = [i for i in b if i in a and a[i] != b[i]]
        if other:
            first = other[0]
            out.append(
                Finding(
                    "error",
                    "tokenizer",
                    f"{len(other)} of {len(b)} ids stand for other text, first {first}: "
                    f"{a[first]!r} and {b[first]!r}",
                    "this drafter was trained with another tokenizer",
                )
            )
        else:
            out.append(Finding("ok", "tokenizer", f"the same {len(b)} ids in both folders"))
    elif _same_file(target.folder, draft.folder, "tiktoken.model", "tokenizer.model"):
        out.append(Finding("ok", "tokenizer", "the same tokenizer file in both folders"))
    else:
        out.append(
            Finding(
                "note",
                "tokenizer",
                "the drafter's folder has no tokenizer to compare: SGLang uses the target's",
            )
        )
    return out


def read_vocabulary(folder: Path) -> dict[int, str] | None:
    """Token id -> text from `tokenizer.json` or `vocab.json`, added tokens included; None when neither is there."""
    path = folder / "tokenizer.json"
    if path.is_file():
        body: dict[str, Any] = json.loads(path.read_text())
        words = body.get("model", {}).get("vocab", {})
        # Unigram models list [text, score] pairs in order of id.
        table = (
            {i: pair[0] for i, pair in enumerate(words)}
            if isinstance(words, list)
            else {int(i): text for text, i in words.items()}
        )
        table.update({int(t["id"]): t["content"] for t in body.get("added_tokens", [])})
        return table
    path = folder / "vocab.json"
    if path.is_file():
        return {int(i): text for text, i in json.loads(path.read_text()).items()}
    return None


def _same_file(one: Path, other: Path, *names: str) -> bool:
    return any(
        (one / n).is_file() and (other / n).is_file() and _digest(one / n) == _digest(other / n)
        for n in names
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _coverage(mapping: Mapping, counts: dict[int, int]) -> list[Finding]:
    covered, missing = vocabulary.coverage(mapping, counts)
    text = f"{covered:.1%} of {sum(counts.values())} token occurrences can be drafted"
    if missing:
        text += "; missing most: " + ", ".join(f"{t} ({n}x)" for t, n in missing[:5])
    # Each missing occurrence ends a draft, so a few percent already cost accept length.
    level: Level = "ok" if covered >= 0.97 else "warning" if covered >= 0.85 else "error"
    remedy = "" if level == "ok" else "choose the draft vocabulary from text that the target writes"
    return [Finding(level, "coverage", text, remedy)]


def _against(mapping: Mapping, other: Mapping) -> list[Finding]:
    seen = vocabulary.overlap(mapping, other)
    text = (
        f"{seen.same_position:,} of {seen.positions:,} positions mean the same token as in the other mapping; "
        f"{seen.shared_tokens:,} tokens are in both"
    )
    if seen.same_position == seen.positions and len(mapping) == len(other):
        return [Finding("ok", "other mapping", text)]
    return [
        Finding(
            "warning",
            "other mapping",
            text,
            "never use a head with the other drafter's d2t: `drafter remap` moves the rows",
        )
    ]
