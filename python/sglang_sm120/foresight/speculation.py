"""Arithmetic of speculative decoding: tokens per pass from acceptance by position, and when a longer draft pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

# Kimi-K2.6 with its EAGLE-3 MLA head, 912 held-out prompts: 0.633 / 0.404 / 0.264, accept length 2.30
# (https://huggingface.co/k-l-lambda/kimi-k2.6-eagle3-mla). Field mixes of Kimi-K2.6 are about the same.
DEFAULT_ACCEPTANCE: tuple[float, ...] = (0.633, 0.404, 0.264)


class Choice(msgspec.Struct, frozen=True):
    """One draft length: drafts per pass, expected tokens per pass and sequence, milliseconds, tokens per second."""

    drafts: int
    tokens: float
    ms: float
    tokens_per_s: float


def reach(acceptance: Sequence[float], position: int) -> float:
    """Probability that the first `position` drafts are all right.

    `acceptance[i]` is that probability for i + 1 drafts. Beyond the last given position the last conditional rate
    goes on.

    Raises:
        ValueError: the curve is empty, rises, or leaves 0..1.
    """
    check(acceptance)
    if position <= len(acceptance):
        return acceptance[position - 1]
    last = acceptance[-1]
    rate = last / (acceptance[-2] if len(acceptance) > 1 else 1.0) if last else 0.0
    return last * rate ** (position - len(acceptance))


def check(acceptance: Sequence[float]) -> None:
    """Raise ValueError unless the values fall from at most 1 to at least 0."""
    if not acceptance:
        raise ValueError("an acceptance curve needs at least one position")
    for before, after in zip((1.0, *acceptance), acceptance, strict=False):
        if not 0.0 <= after <= before:
            raise ValueError(
                f"acceptance {list(acceptance)} must fall from at most 1 to at least 0: "
                "give the share of passes in which the first i drafts are right"
            )


def tokens_per_pass(acceptance: Sequence[float], drafts: int) -> float:
    """Accept length with `drafts` drafts: one token of the target and each draft that is reached."""
    return 1.0 + sum(reach(acceptance, i) for i in range(1, drafts + 1))


def break_even(plain_ms: float, pass_ms: float) -> float:
    """Accept length at which a speculative pass of `pass_ms` makes as many tokens per second as plain decoding."""
    return pass_ms / plain_ms


def lengths(
    pass_ms: Callable[[int], float], acceptance: Sequence[float], sequences: int, longest: int
) -> list[Choice]:
    """Every draft length from 0 (no speculation) to `longest`.

    Args:
        pass_ms: milliseconds of a whole pass, drafting included, for a number of drafts.
        sequences: sequences decoded together; tokens per second are of all of them.
    """
    out = []
    for drafts in range(longest + 1):
        tokens = tokens_per_pass(acceptance, drafts)
        ms = pass_ms(drafts)
        out.append(Choice(drafts, tokens, ms, sequences * tokens / ms * 1e3))
    return out


def best(choices: Sequence[Choice]) -> Choice:
    """The draft length with the most tokens per second; the shortest among equals."""
    return max(choices, key=lambda c: (c.tokens_per_s, -c.drafts))
