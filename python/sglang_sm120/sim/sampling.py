"""Sampled verification of draft trees on the CPU, for the names that SGLang leaves empty where it has no kernel."""

from __future__ import annotations

import torch


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep each row's top_k largest probabilities (ties included) and scale the row to 1.

    Args:
        probs: [rows, vocab].
        top_k: [rows] ints; values beyond the vocabulary keep everything.
    """
    width = probs.shape[-1]
    kth = top_k.long().clamp(1, width) - 1
    least = probs.sort(-1, descending=True).values.gather(1, kth.view(-1, 1))
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's most probable tokens until their sum reaches top_p, and scale the row to 1.

    Args:
        probs: [rows, vocab].
        top_p: [rows], 0 to 1.
    """
    ordered, place = probs.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    inside = before < top_p.view(-1, 1).to(before.dtype)
    inside[:, 0] = True
    kept = torch.zeros_like(probs).scatter(1, place, torch.where(inside, ordered, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def sample_tree(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk each tree by sampling from the target's distribution; write the results in place.

    At a node the children are tried in order with one coin: a child is taken once the coin is at most the summed
    target probability of the children tried (divided by threshold_acc), or its own probability reaches
    threshold_single. If none is taken the next token is drawn from the target's distribution without the children
    tried. With both thresholds at 1 a token then has exactly the target's probability.

    Args:
        predicts: [batch * tokens] ints, the token after each accepted node.
        accept_index: [batch, depth + 1], flat numbers of the accepted nodes, root first; the rest stays as it is.
        accept_token_num: [batch], accepted draft tokens (the root not counted).
        candidates: [batch, tokens], token of each node.
        retrive_index: [batch, tokens], number of each node in the flattened batch.
        retrive_next_token: [batch, tokens], first child or -1.
        retrive_next_sibling: [batch, tokens], next child of the same parent or -1.
        uniform_samples: [batch, tokens] coins, the one of a node decides among its children.
        uniform_samples_for_final_sampling: [batch] coins of the last draw.
        target_probs: [batch, tokens, vocab].
        draft_probs: [batch, tokens, vocab], subtracted before the last draw; the tried children are added to it.
        threshold_single: Probability at which a child is taken whatever the coin.
        threshold_acc: Divisor of the summed probability.
        deterministic: Always so here.
    """
    tokens, index = candidates.tolist(), retrive_index.tolist()
    child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins = uniform_samples.tolist()
    final_coins = uniform_samples_for_final_sampling.reshape(-1)
    flat_predicts, depth = predicts.view(-1), accept_index.shape[1] - 1
    for b in range(candidates.shape[0]):
        node, path = 0, [index[b][0]]
        while len(path) <= depth:
            taken, tried, at = -1, 0.0, child[b][node]
            while at != -1:
                probability = float(target_probs[b, node, tokens[b][at]])
                tried += probability
                if coins[b][node] <= tried / threshold_acc or probability >= threshold_single:
                    taken = at
                    break
                draft_probs[b, node, tokens[b][at]] = probability
                at = sibling[b][at]
            if taken == -1:
                break
            flat_predicts[path[-1]] = tokens[b][taken]
            path.append(index[b][taken])
            node = taken
        rest = target_probs[b, node]
        if len(path) <= depth:
            rest = (rest - draft_probs[b, node]).clamp_min(0)
        flat_predicts[path[-1]] = _draw(rest, final_coins[b])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1


def _draw(weights: torch.Tensor, coin: torch.Tensor) -> int:
    """The token at which the summed weights pass `coin` of their total."""
    sums = weights.double().cumsum(-1)
    place = int(torch.searchsorted(sums, coin.double() * sums[-1], right=True))
    last = int(weights.nonzero()[-1]) if bool((weights > 0).any()) else int(weights.argmax())
    return min(place, last)
