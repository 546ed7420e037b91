"""Training of the tiny targets and their EAGLE-3 heads on a CPU, in about a minute each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from sglang_sm120.sim.net import Decoder, Eagle3Head

# A target that does not know its text after its steps gets this many shorter, slower rounds more.
_EXTRA_ROUNDS = 3

# (part done between 0 and 1, what there is to say about it)
Report = Callable[[float, str], None]


class TrainingError(RuntimeError):
    """A model did not reach what it must reach within its steps."""


@dataclass(frozen=True)
class TargetRecipe:
    """How a target learns its text by heart.

    Attributes:
        steps: Most optimiser steps; it stops early once the text is known.
        batch: Windows per step.
        window: Tokens per window.
        rate: Peak learning rate.
        context: From this many tokens of context on, every next token must be right.
        margin: Least lead of the right logit over the runner-up, so that bf16 rounding cannot change a choice.
    """

    steps: int = 600
    batch: int = 4
    window: int = 160
    rate: float = 5e-3
    context: int = 24
    margin: float = 2.0


@dataclass(frozen=True)
class DrafterRecipe:
    """How an EAGLE-3 head learns to continue its target.

    Attributes:
        steps: Optimiser steps.
        batch: Windows per step.
        window: Tokens per window.
        pool: Windows drawn once, on which the target runs once.
        rate: Peak learning rate.
        draft_steps: Draft steps unrolled in training.
        context: Tokens of context in a window whose predictions do not count.
        goal: Expected accept length at which training may stop.
    """

    steps: int = 200
    batch: int = 8
    window: int = 160
    pool: int = 96
    rate: float = 3e-3
    draft_steps: int = 3
    context: int = 24
    goal: float = 3.2


def windows(data: torch.Tensor, count: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """[count, length] slices of a text that starts over at its end."""
    start = torch.randint(len(data), (count, 1), generator=draw)
    return data[(start + torch.arange(length)) % len(data)]


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 20)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train_target(
    model: Decoder, data: torch.Tensor, recipe: TargetRecipe, seed: int, report: Report
) -> float:
    """Train until every token of the text follows from its `context` predecessors; returns the least margin.

    Raises:
        TrainingError: The text is not known after `recipe.steps` steps and the further rounds.
    """
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    weight = torch.ones(recipe.window)
    # Nobody can know the next token right after a random start: those rows count little.
    weight[: recipe.context] = 0.1
    rounds = [(recipe.steps, recipe.rate)] + [(recipe.steps // 3, recipe.rate / 3)] * _EXTRA_ROUNDS
    done, margin = 0, -math.inf
    model.train()
    for steps, rate in rounds:
        for step in range(steps):
            for group in optimiser.param_groups:
                group["lr"] = rate * _schedule(step, steps)
            ids = windows(data, recipe.batch, recipe.window + 1, draw)
            logits, _ = model(ids[:, :-1])
            losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            losses = losses * weight
            optimiser.zero_grad(set_to_none=True)
            losses.mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            done += 1
            if step % 20 == 19 or step == steps - 1:
                known = losses[:, recipe.context :].mean().item()
                # Checking the whole text costs several steps; only worth it once most of it is known.
                if known < 0.05 or step == steps - 1:
                    margin = least_margin(model, data, recipe)
                part = min(1.0, done / recipe.steps)
                report(part, f"step {done}, loss {known:.3f}, margin {margin:.1f}")
                if margin >= recipe.margin:
                    model.eval()
                    return margin
    raise TrainingError(
        f"the target's least margin is {margin:.2f} logits after {done} steps, "
        f"{recipe.margin} are needed; train longer"
    )


@torch.no_grad()
def _states(
    target: Decoder, aux_layers: tuple[int, ...], ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's states (those of `aux_layers` side by side) and greedy choices on windows."""
    states, choices = [], []
    for part in ids.split(8):
        logits, aux = target(part, aux_layers)
        assert aux is not None
        states.append(aux)
        choices.append(logits.argmax(-1))
    return torch.cat(states), torch.cat(choices)


@torch.no_grad()
def least_margin(model: Decoder, data: torch.Tensor, recipe: TargetRecipe) -> float:
    """Least lead of the right next token over any other, over the whole text; negative if one is wrong."""
    training = model.training
    model.eval()
    # Windows overlap such that every token is judged with `context` to `window` tokens before it.
    stride = recipe.window - recipe.context
    starts = torch.arange(0, len(data), stride).unsqueeze(1)
    ids = data[(starts + torch.arange(recipe.window + 1)) % len(data)]
    worst = math.inf
    for part in ids.split(recipe.batch):
        logits = model(part[:, :-1])[0][:, recipe.context :]
        right = part[:, 1 + recipe.context :].unsqueeze(-1)
        others = logits.scatter(-1, right, -math.inf).max(-1).values
        worst = min(worst, (logits.gather(-1, right).squeeze(-1) - others).min().item())
    model.train(training)
    return worst


def train_drafter(
    head: Eagle3Head,
    target: Decoder,
    aux_layers: tuple[int, ...],
    data: torch.Tensor,
    recipe: DrafterRecipe,
    seed: int,
    report: Report,
) -> float:
    """Train a head on its target's own choices; returns the expected accept length on the text.

    The target's greedy continuation of any place of the text is the text (train_target made sure), so the target's
    choices and states along it are those of its own greedy outputs.
    """
    draw = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad],
        lr=recipe.rate,
        betas=(0.9, 0.98),
        weight_decay=0.01,
    )
    pool_ids = windows(data, recipe.pool, recipe.window, draw)
    pool_aux, pool_choice = _states(target, aux_layers, pool_ids)
    expected = 1.0
    for step in range(recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate * _schedule(step, recipe.steps)
        picked = torch.randperm(recipe.pool, generator=draw)[: recipe.batch]
        ids, aux, choice = pool_ids[picked], pool_aux[picked], pool_choice[picked]
        loss = torch.zeros(())
        hits = torch.ones(ids.shape[0], ids.shape[1] - 1 - recipe.draft_steps - recipe.context)
        expected = 1.0
        for number, logits in enumerate(head.unroll(ids, aux, recipe.draft_steps)):
            # Row t drafts token t + 2 + number, which the target chooses at t + 1 + number.
            right = choice[:, 1 + number : 1 + number + logits.shape[1]][:, recipe.context :]
            logits = logits[:, recipe.context :]
            loss = loss + 0.8**number * F.cross_entropy(logits.flatten(0, 1), right.flatten())
            hits = hits * (logits.argmax(-1) == right)
            expected += hits.mean().item()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        if step % 20 == 19 or step == recipe.steps - 1:
            report((step + 1) / recipe.steps, f"accept length {expected:.2f}")
            if expected >= recipe.goal:
                break
    report(1.0, f"accept length {expected:.2f}")
    return expected
