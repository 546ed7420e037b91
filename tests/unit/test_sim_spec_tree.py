"""EAGLE trees of the CPU platform against trees described node by node."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.sim import spec_tree


@st.composite
def trees(draw, max_tokens=9, max_topk=4):
    """(parents of nodes 1.., selected candidates, parent list, topk): a tree and its encoding."""
    topk = draw(st.integers(1, max_topk))
    tokens = draw(st.integers(2, max_tokens))
    parents, children = [], {0: 0}
    for node in range(1, tokens):
        open_nodes = [p for p, n in children.items() if n < topk]
        parent = draw(st.sampled_from(open_nodes))
        children[parent] += 1
        children[node] = 0
        parents.append(parent)
    # Slot 0 stands for the root; each inner node gets the next slot; candidate = slot * topk + child number.
    slot_of, parent_list, born, selected = {0: 0}, [-1], dict.fromkeys(range(tokens), 0), []
    for parent in parents:
        if parent not in slot_of:
            slot_of[parent] = len(parent_list)
            parent_list.append(selected[parent - 1])
        selected.append(slot_of[parent] * topk + born[parent])
        born[parent] += 1
    return parents, selected, parent_list, topk


def ancestors(parents, node):
    """The node itself and all above it, the root included."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path


def build(batch, lengths, tokens, topk, depth, full):
    """Run build_tree on trees of equal size; returns mask, positions, index, next, sibling."""
    slots = max(len(parent_list) for _, _, parent_list, _ in batch)
    parent_list = torch.tensor([p + [0] * (slots - len(p)) for _, _, p, _ in batch])
    selected = torch.tensor([s for _, s, _, _ in batch])
    size = sum(tokens * (tokens + (length if full else 0)) for length in lengths)
    mask = torch.ones(size, dtype=torch.bool)
    positions = torch.full((len(batch) * tokens,), -7)
    links = torch.full((3, len(batch), tokens), -1)
    spec_tree.build_tree(
        parent_list, selected, torch.tensor(lengths), mask, positions, *links, topk, depth, tokens, full
    )  # fmt: skip
    return mask, positions, *links


@settings(max_examples=80, deadline=None)
@given(tree=trees(), full=st.booleans(), length=st.integers(0, 5))
def test_masks_positions_and_links_describe_the_tree(tree, full, length):
    parents, _, _, topk = tree
    tokens = len(parents) + 1
    # A second request with another length checks the offsets between requests.
    lengths = [length, 3]
    mask, positions, index, child, sibling = build(
        [tree, tree], lengths, tokens, topk, tokens, full
    )
    at = 0
    for b, cached in enumerate(lengths):
        columns = tokens + (cached if full else 0)
        part = mask[at : at + tokens * columns].view(tokens, columns)
        at += tokens * columns
        assert part[:, : columns - tokens].all()  # the prefix is left as it was
        for node in range(tokens):
            path = ancestors(parents, node)
            seen = part[node, columns - tokens :].nonzero().flatten().tolist()
            assert seen == sorted(path)
            assert positions[b * tokens + node] == cached + len(path) - 1
            assert index[b, node] == b * tokens + node
            kids, walk = [n for n in range(1, tokens) if parents[n - 1] == node], []
            at_child = int(child[b, node])
            while at_child != -1:
                walk.append(at_child)
                at_child = int(sibling[b, at_child])
            assert walk == kids


def test_a_node_whose_parent_was_not_selected_is_left_out_of_the_links():
    # Candidate 2 hangs on slot 1 = candidate 1, which is not in the tree.
    assert spec_tree.tree_parents([0, 2], [-1, 1], 2) == [0, -1]
    *_, child, sibling = build([([], [0, 2], [-1, 1], 2)], [4], 3, 2, 3, True)
    assert child.tolist() == [[1, -1, -1]] and sibling.tolist() == [[-1, -1, -1]]


@settings(max_examples=120, deadline=None)
@given(tree=trees(), data=st.data())
def test_greedy_verification_walks_as_far_as_the_target_agrees(tree, data):
    parents, _, _, topk = tree
    tokens = len(parents) + 1
    limit = data.draw(st.integers(1, tokens), label="most accepted drafts")
    candidates = torch.tensor(
        [data.draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens)) for _ in range(2)]
    )
    choice = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=2 * tokens, max_size=2 * tokens))
    )
    *_, index, child, sibling = build([tree, tree], [2, 5], tokens, topk, tokens, True)
    predicts = torch.full((2 * tokens,), -1)
    accept = torch.full((2, limit + 1), -1)
    number = torch.full((2,), -1)
    spec_tree.verify_greedy(predicts, accept, number, candidates, index, child, sibling, choice)
    for b in range(2):
        path = [0]
        while len(path) <= limit:
            wanted = choice[b * tokens + path[-1]]
            kids = [n for n in range(1, tokens) if parents[n - 1] == path[-1]]
            match = [n for n in kids if candidates[b, n] == wanted]
            if not match:
                break
            path.append(match[0])
        flat = [b * tokens + node for node in path]
        assert accept[b, : len(path)].tolist() == flat
        assert (accept[b, len(path) :] == -1).all()
        assert number[b] == len(path) - 1
        for node in range(tokens):
            want = choice[b * tokens + node] if node in path else -1
            assert predicts[b * tokens + node] == want
