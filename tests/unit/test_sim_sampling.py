"""Sampled verification on the CPU: the target's distribution comes out, whatever was drafted."""

from __future__ import annotations

import pytest
import torch
from sglang_sm120.sim import sampling, spec_tree


def test_top_k_keeps_the_largest_and_scales():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    got = sampling.top_k_renorm(probs, torch.tensor([2, 1 << 30], dtype=torch.int32))
    torch.testing.assert_close(got, torch.tensor([[0, 4 / 7, 0, 3 / 7], [0.1, 0.4, 0.2, 0.3]]))


def test_top_p_keeps_until_the_sum_is_reached_and_never_nothing():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 3)
    got = sampling.top_p_renorm(probs, torch.tensor([0.65, 0.0, 1.0]))
    want = [[0, 4 / 7, 0, 3 / 7], [0, 1, 0, 0], [0.1, 0.4, 0.2, 0.3]]
    torch.testing.assert_close(got, torch.tensor(want))


def walk(probs, drafted, topk, coins, final):
    """Sample one tree of depth 2: `drafted` children of the root, then one child of the first."""
    count, batch = len(drafted) + 2, coins.shape[0]
    # Slots of the parent list: 0 is the root, 1 is candidate 0.
    selected = torch.tensor([[*range(len(drafted)), topk]]).expand(batch, -1)
    parents = torch.tensor([[-1, 0]]).expand(batch, -1)
    links = torch.full((3, batch, count), -1)
    mask, positions = (
        torch.ones(batch * count * count, dtype=torch.bool),
        torch.zeros(batch * count),
    )
    spec_tree.build_tree(
        parents, selected, torch.zeros(batch, dtype=torch.long), mask, positions, *links, topk, 3, count, False
    )  # fmt: skip
    tokens = torch.tensor([[0, *drafted, 2]]).expand(batch, -1)
    predicts = torch.full((batch * count,), -1)
    accept, number = torch.full((batch, 3), -1), torch.zeros(batch, dtype=torch.long)
    target = probs.expand(batch, count, -1).clone()
    sampling.sample_tree(
        predicts, accept, number, tokens, *links, coins, final, target, torch.zeros_like(target)
    )
    return predicts.view(batch, count), accept, number


@pytest.mark.parametrize("drafted", [[1], [3, 1], [2, 0, 1]])
def test_first_token_has_the_targets_distribution(drafted):
    draw = torch.Generator().manual_seed(4)
    probs, batch = torch.tensor([0.1, 0.25, 0.45, 0.2]), 1500
    coins = torch.rand(batch, len(drafted) + 2, generator=draw)
    predicts, accept, number = walk(probs, drafted, 3, coins, torch.rand(batch, generator=draw))
    share = torch.bincount(predicts[:, 0], minlength=4) / batch
    # Four standard deviations of a share of 1500 draws.
    assert (share - probs).abs().max() < 4 * (0.25 / batch) ** 0.5
    accepted = torch.isin(predicts[:, 0], torch.tensor(drafted))
    assert torch.equal(number > 0, accepted)
    assert (accept[:, 0] % (len(drafted) + 2) == 0).all() and (accept[~accepted, 1] == -1).all()


def test_the_second_token_and_the_bonus_follow_the_accepted_path():
    sure = torch.tensor([0.0, 1.0, 0.0, 0.0])
    # The root's child 1 is certain; its child 2 has no chance, so token 1 is drawn after it.
    predicts, accept, number = walk(
        sure, [1], 1, torch.tensor([[0.99, 0.5, 0.5]]), torch.tensor([0.3])
    )
    assert number.tolist() == [1] and accept.tolist() == [[0, 1, -1]]
    assert predicts.tolist() == [[1, 1, -1]]


def test_a_coin_of_one_stays_inside_the_vocabulary():
    assert sampling._draw(torch.tensor([0.2, 0.8, 0.0]), torch.tensor(1.0)) == 1
    assert sampling._draw(torch.tensor([0.0, 0.8, 0.2]), torch.tensor(0.0)) == 1
    assert sampling._draw(torch.zeros(3), torch.tensor(0.5)) == 0
