"""Accept length of a running server by draft position and by class of prompt, and what its shape says.

The server is asked through SGLang's `/generate`; its answer's `meta_info` carries, with speculation on,
`spec_verify_ct`, `completion_tokens` and `spec_correct_drafts_histogram` (passes by number of right drafts).
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

# Published EAGLE-3 heads reach 0.55 to 0.80 at position 1 (https://huggingface.co/lightseekorg/kimi-k2.5-eagle3-mla,
# https://huggingface.co/k-l-lambda/kimi-k2.6-eagle3-mla); guessing frequent tokens reaches a few percent.
CHANCE = 0.15


class MeasureError(RuntimeError):
    """The server could not be measured; the text names the address and what it answered."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt and the class it counts for."""

    text: str
    group: str = "all"


class Group(msgspec.Struct, frozen=True):
    """What one class of prompts showed.

    Attributes:
        group: class; prompts, tokens, passes: counts.
        positions: share of passes in which the first i drafts were right, i from 1; ends where no pass got further.
    """

    group: str
    prompts: int
    tokens: int
    passes: int
    positions: tuple[float, ...]

    @property
    def accept_length(self) -> float:
        """Tokens per verify pass."""
        return self.tokens / self.passes if self.passes else 0.0


class Verdict(msgspec.Struct, frozen=True):
    """What the shape of the acceptance says; `misaligned` when hidden states look wrong."""

    misaligned: bool
    text: str


Ask = Callable[[str, int], dict[str, Any]]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines `{"prompt": ..., "class": ...}`, or one prompt per line of plain text.

    Raises:
        MeasureError: the file is empty or a line is neither.
    """
    out: list[Prompt] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        if line.lstrip().startswith("{"):
            try:
                body = json.loads(line)
                out.append(Prompt(str(body["prompt"]), str(body.get("class", "all"))))
            except (json.JSONDecodeError, KeyError) as error:
                raise MeasureError(
                    f'{path}:{number}: expected {{"prompt": ..., "class": ...}}: {error!r}'
                ) from error
        else:
            out.append(Prompt(line))
    if not out:
        raise MeasureError(f"{path} holds no prompts")
    return out


def server(url: str, timeout_s: float = 300.0) -> Ask:
    """A function that asks the server at `url` for greedy text and returns its meta_info."""

    def ask(prompt: str, max_tokens: int) -> dict[str, Any]:
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_tokens},
        }
        request = urllib.request.Request(
            f"{url.rstrip('/')}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                got = json.load(answer)
        except (urllib.error.URLError, OSError, json.JSONDecodeError) as error:
            raise MeasureError(f"{url}/generate did not answer: {error}") from error
        if not isinstance(got, dict) or "meta_info" not in got:
            raise MeasureError(f"{url}/generate answered without meta_info: {str(got)[:200]}")
        return dict(got["meta_info"])

    return ask


def measure(ask: Ask, prompts: Iterable[Prompt], max_tokens: int) -> list[Group]:
    """Run all prompts one by one; one `Group` per class in order of appearance, then "all".

    Raises:
        MeasureError: the server drafts nothing (no speculation, or an SGLang that does not report it).
    """
    histograms: dict[str, list[int]] = {}
    totals: dict[str, list[int]] = {}
    for prompt in prompts:
        info = ask(prompt.text, max_tokens)
        passes = int(info.get("spec_verify_ct") or 0)
        if not passes:
            raise MeasureError(
                "the server reports no verify passes: start it with --speculative-algorithm EAGLE3 "
                "and a draft model"
            )
        histogram = [int(n) for n in info.get("spec_correct_drafts_histogram") or ()]
        for group in dict.fromkeys((prompt.group, "all")):
            total = totals.setdefault(group, [0, 0, 0])
            total[0] += 1
            total[1] += int(info["completion_tokens"])
            total[2] += passes
            known = histograms.setdefault(group, [])
            known.extend([0] * (len(histogram) - len(known)))
            for i, n in enumerate(histogram):
                known[i] += n
    order = [g for g in totals if g != "all"] + ["all"]
    return [
        Group(g, totals[g][0], totals[g][1], totals[g][2], reached(histograms[g])) for g in order
    ]


def reached(histogram: Sequence[int]) -> tuple[float, ...]:
    """From passes by number of right drafts to the share of passes that got at least i right, i from 1."""
    total = sum(histogram)
    return tuple(sum(histogram[i:]) / total for i in range(1, len(histogram))) if total else ()


def judge(everything: Group, mapping_is_right: bool | None) -> Verdict:
    """Whether the drafter's hidden states look misaligned.

    Args:
        everything: the group "all".
        mapping_is_right: what `drafter check` said about vocabulary and head; None when it was not run.
    """
    if not everything.positions:
        return Verdict(False, "the server does not report drafts by position: no judgement")
    first = everything.positions[0]
    upper = _upper(first, everything.passes)
    if upper < CHANCE:
        said = f"position 1 is right in {first:.1%} of passes (at most {upper:.1%}), about what guessing gives"
        if mapping_is_right is False:
            return Verdict(
                False, f"{said}: expected, the draft vocabulary or head is wrong; fix that first"
            )
        certain = (
            "the mapping is right, so the hidden states are not the ones it was trained on"
            if mapping_is_right
            else "if `drafter check` finds the mapping right, the hidden states are misaligned"
        )
        return Verdict(
            True, f"{said}: {certain} (aux layers, their order, a norm before or after capture)"
        )
    if len(everything.positions) > 1:
        onward = everything.positions[1] / first if first else 0.0
        if _upper(onward, round(everything.passes * first)) < 0.3 * first:
            return Verdict(
                True,
                f"position 1 is right in {first:.1%} of passes, but only {onward:.1%} of those go on: the state that "
                "the drafter feeds itself looks misaligned (its norm, or positions after the first step)",
            )
    if first < 0.4:
        return Verdict(
            False,
            f"position 1 is right in {first:.1%} of passes: above guessing, below the 55-80% that published heads "
            "reach; look at coverage, prompts, and the aux layers (states of a neighbouring layer, or in another "
            "order, still guess about half)",
        )
    return Verdict(False, f"position 1 is right in {first:.1%} of passes: healthy")


def _upper(share: float, trials: int, z: float = 1.96) -> float:
    """Upper end of the Wilson interval of a share."""
    if trials <= 0:
        return 1.0
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return (middle + spread) / (1 + z * z / trials)
