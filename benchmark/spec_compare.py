"""Which kind of speculation pays on this machine: plain, EAGLE-3 at fixed lengths, n-gram, adaptive, ours.

    python benchmark/spec_compare.py --drafter lightseekorg/kimi-k2.5-eagle3-mla -- \\
        python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 --trust-remote-code
    python benchmark/spec_compare.py --sim llama            # tiny model on this CPU; times mean nothing

Everything after `--` is the launch line without speculation; each setting adds its flags, starts that server,
sends the same prompts to its OpenAI endpoint and stops it. All settings run in one call, one after another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from spec_compare_client import Row, ServerFailed, measure, serving

CLASSES = ("low", "middle", "high")

_CODE = "\n".join(
    f"def area_{name}({a}, {b}):\n    return {a} * {b} * {factor}\n"
    for name, a, b, factor in (
        ("rectangle", "width", "height", "1.0"),
        ("triangle", "base", "height", "0.5"),
        ("ellipse", "major", "minor", "3.14159"),
        ("rhombus", "first", "second", "0.5"),
    )
)
PROMPTS: dict[str, list[str]] = {
    "low": [
        "Write forty random unrelated English words, each on its own line, no pattern:\n",
        "Invent a surreal poem in which no noun appears twice and nothing follows from anything:\n",
        "List invented names of distant planets, each as strange as possible:\n",
    ],
    "middle": [
        "Explain to a student how a heat pump works and when it is efficient.\n",
        "Write a Python class for a bounded queue with blocking put and get, with comments.\n",
        "Summarise the causes of the French Revolution in a few paragraphs.\n",
    ],
    "high": [
        f"Repeat this file three times without any change:\n{_CODE}\nFirst copy:\n",
        "Write the numbers from 1 to 300, separated by commas: 1, 2, 3, 4, 5, 6, 7, 8,",
        f"Add a docstring to each function and leave the rest as it is:\n{_CODE}\nResult:\n",
    ],
}


@dataclass(frozen=True)
class Setting:
    """One way to start the server."""

    name: str
    flags: tuple[str, ...]


def eagle(drafter: str, steps: int) -> tuple[str, ...]:
    return (
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", drafter,
        "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(steps + 1),
    )  # fmt: skip


def settings(
    drafter: str, steps: Sequence[int], adaptive_config: str | None, ngram_tokens: int
) -> list[Setting]:
    """Every setting, in the order of the table."""
    adaptive: tuple[str, ...] = (*eagle(drafter, 3), "--speculative-adaptive")
    if adaptive_config:
        adaptive += ("--speculative-adaptive-config", adaptive_config)
    fusion = ("--enable-sm120-fusion",)
    return [
        Setting("plain", ()),
        Setting("plain, our sums", fusion),
        *(Setting(f"EAGLE-3 k={k}", eagle(drafter, k)) for k in steps),
        Setting(
            "n-gram",
            (
                "--speculative-algorithm",
                "NGRAM",
                "--speculative-num-draft-tokens",
                str(ngram_tokens),
            ),
        ),
        Setting("adaptive (SGLang)", adaptive),
        Setting("adaptive (SGLang), our sums", (*adaptive, *fusion, "--sm120-verify", "off")),
        Setting("adaptive (ours)", (*adaptive, *fusion)),
    ]


def table(rows: Sequence[Row], rig: str) -> str:
    """Markdown: tokens/s with the ratio to plain, accept length and pass time per class of prompts."""
    plain = {r.prompts: r.tokens_per_s for r in rows if r.setting == "plain"}
    kinds = [k for k in CLASSES if any(r.prompts == k for r in rows)]
    head = "".join(f" {k} tok/s | x plain | accept | pass ms |" for k in kinds)
    lines = [
        f"Speculation compared, {rig}",
        "",
        f"| setting |{head}",
        "|---|" + "---|" * 4 * len(kinds),
    ]
    for name in dict.fromkeys(r.setting for r in rows):
        cells = []
        for kind in kinds:
            row = next((r for r in rows if (r.setting, r.prompts) == (name, kind)), None)
            if row is None:
                cells += ["-"] * 4
                continue
            ratio = f"{row.tokens_per_s / plain[kind]:.2f}" if kind in plain else "-"
            cells += [
                f"{row.tokens_per_s:.1f}",
                ratio,
                f"{row.accept_length:.2f}",
                f"{row.pass_ms:.1f}",
            ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def differing(rows: Sequence[Row]) -> list[str]:
    """Settings whose greedy texts are not those of the plain server."""
    plain = {r.prompts: r.texts for r in rows if r.setting == "plain"}
    return [f"{r.setting}, {r.prompts}" for r in rows if r.texts != plain.get(r.prompts, r.texts)]


def plot(rows: Sequence[Row], rig: str, path: Path) -> None:
    """Tokens per second by setting, one bar per class of prompts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r.setting for r in rows))
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(names) + 1.5), constrained_layout=True)
    for offset, (kind, colour) in zip(
        (-0.27, 0.0, 0.27), zip(CLASSES, ("#b0b7bf", "#6c9a8b", "#2a6f97"), strict=True)
    ):
        found = {r.setting: r.tokens_per_s for r in rows if r.prompts == kind}
        at = [i + offset for i, n in enumerate(names) if n in found]
        axes.barh(at, [found[n] for n in names if n in found], 0.25, label=kind, color=colour)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    axes.set_title(f"Speculation compared, {rig}", fontsize=10)
    axes.legend(title="predictability", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def sim_launch(family: str) -> tuple[list[str], dict[str, str], str, dict[str, list[str]]]:
    """Launch line, environment, drafter and prompts of a tiny model on the CPU platform."""
    from sglang_sm120.sim import models
    from sglang_sm120.sim.server import BASE_FLAGS

    built = models.build(family)
    line = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        built.target,
        "--tp",
        "2",
        *BASE_FLAGS,
    ]
    known = [case.prompt for case in built.cases(3)]
    rng = random.Random(7)
    shuffled = ["".join(rng.sample(p, len(p))) for p in known]
    half = [a[:24] + b[:24] for a, b in zip(shuffled, known)]
    env = {"SGLANG_PLATFORM": "sm120_sim", "HF_HUB_OFFLINE": "1"}
    return line, env, built.drafter, {"low": shuffled, "middle": half, "high": known}


def reason(error: Exception) -> str:
    """The last line of a failed server's log that names an error, or the error's own first line."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    named = [x for x in lines[1:] if ("Error" in x or "error" in x) and "details" not in x]
    return (named[-1] if named else lines[0])[:200]


def rig_name(given: str, sim: str) -> str:
    if given:
        return given
    if sim:
        return f"CPU server, simulated platform, tiny {sim} model (times mean nothing)"
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return f"{count} x {pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))}"
    except Exception:
        return platform.node()


def main() -> None:
    results = Path(__file__).parent / "results"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafter", help="EAGLE-3 drafter, path or name")
    parser.add_argument("--steps", default="1,2,3,5", help="fixed EAGLE-3 lengths")
    parser.add_argument("--ngram-tokens", type=int, default=8)
    parser.add_argument("--adaptive-config", help="SGLang's adaptive config, for candidate lengths")
    parser.add_argument(
        "--only", default="", help="settings to run, by parts of their names, comma-separated"
    )
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--port", type=int, default=30000 + os.getpid() % 2000)
    parser.add_argument("--start-timeout", type=float, default=1800.0)
    parser.add_argument("--rig", default="", help="names the machine in the title")
    parser.add_argument(
        "--sim", choices=("llama", "deepseek"), default="", help="the tiny CPU server"
    )
    parser.add_argument("--out", type=Path, default=results / "spec_compare.json")
    parser.add_argument("--plot", type=Path, default=results / "spec_compare.png")
    parser.add_argument("launch", nargs="*", help="launch line without speculation, after --")
    args = parser.parse_args()
    env: dict[str, str] = {}
    prompts, drafter, line = PROMPTS, args.drafter, list(args.launch)
    if args.sim:
        line, env, drafter, prompts = sim_launch(args.sim)
    if not line or not drafter:
        parser.error("give --drafter and a launch line after --, or --sim")
    wanted = [w for w in args.only.split(",") if w]
    chosen = [
        s
        for s in settings(
            drafter,
            [int(k) for k in args.steps.split(",")],
            args.adaptive_config,
            args.ngram_tokens,
        )
        if not wanted or any(w in s.name for w in wanted)
    ]
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for setting in chosen:
        try:
            with serving([*line, *setting.flags], args.port, env, args.start_timeout) as url:
                for kind in CLASSES:
                    row = measure(
                        url, setting.name, kind, prompts[kind], args.tokens, args.concurrency, args.rounds
                    )  # fmt: skip
                    rows.append(row)
                    print(
                        f"{row.setting}, {kind}: {row.tokens_per_s:.1f} tok/s, accept {row.accept_length:.2f}, "
                        f"{row.pass_ms:.1f} ms per pass",
                        flush=True,
                    )
        except (ServerFailed, httpx.HTTPError) as error:
            # One setting that this model or machine does not have must not cost the others' figures.
            failed[setting.name] = reason(error)
            print(f"{setting.name}: {failed[setting.name]}", flush=True)
    rig = rig_name(args.rig, args.sim)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"rig": rig, "rows": [asdict(r) for r in rows], "failed": failed}
    args.out.write_text(json.dumps(data, indent=1))
    if not rows:
        raise SystemExit("no setting could be measured")
    plot(rows, rig, args.plot)
    print("\n" + table(rows, rig))
    for name, why in failed.items():
        print(f"not measured: {name} ({why})")
    if others := differing(rows):
        print("\ngreedy texts differ from the plain server's: " + "; ".join(others))
    means = {
        s.name: statistics.fmean(r.tokens_per_s for r in rows if r.setting == s.name)
        for s in chosen
        if any(r.setting == s.name for r in rows)
    }
    print(f"\nbest over all prompts: {max(means, key=lambda n: means[n])}")


if __name__ == "__main__":
    main()
