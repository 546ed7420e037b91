"""EAGLE's draft tree on the CPU: building it, and checking it against the target's greedy choice.

A tree of `n` tokens per request has node 0 (the last accepted token) as its root. Drafting gives, per request, a list of
candidates, `topk` children per parent; `selected` names those that made it into the tree, and `parent_list` says which
candidate the children of parent slot p hang on. Both follow the conventions of SGLang's `spec_tree` operations.
"""

from __future__ import annotations

import torch


def tree_parents(selected: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent node of nodes 1..n-1; -1 for a node whose parent is not in the tree.

    Args:
        selected: n - 1 candidate numbers, candidate c being child c % topk of parent slot c // topk.
        parent_list: Candidate number that parent slot p stands for; slot 0 is the root.
        topk: Children per parent slot.
    """
    node_of: dict[int, int] = {}
    for node, candidate in enumerate(selected, start=1):
        node_of.setdefault(candidate, node)
    parents = []
    for candidate in selected:
        slot = candidate // topk
        parents.append(0 if slot == 0 else node_of.get(parent_list[slot], -1))
    return parents


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_tokens: int,
    full_mask: bool,
) -> None:
    """Fill the mask, positions and links of every request's tree in place.

    Args:
        parent_list: [batch, slots] ints.
        selected_index: [batch, num_tokens - 1] ints.
        seq_lens: [batch] ints, tokens already in the KV pool.
        tree_mask: Flat bool or uint8. Full: per request [num_tokens, seq_len + num_tokens], of which the last
            num_tokens columns are written; else [num_tokens, num_tokens].
        positions: [batch * num_tokens], position of each node: seq_len + its depth.
        retrieve_index: [batch, num_tokens], number of each node in the flattened batch.
        retrieve_next_token: [batch, num_tokens], first child, or left as it is (-1).
        retrieve_next_sibling: [batch, num_tokens], next child of the same parent, or left as it is (-1).
        topk: Children per parent slot.
        depth: Longest path from the root; ancestors farther away are not visible.
        num_tokens: Nodes per tree, the root included.
        full_mask: Whether the mask has columns for the prefix.
    """
    batch = seq_lens.shape[0]
    lengths = seq_lens.tolist()
    parent_rows = parent_list.reshape(batch, -1).tolist() if parent_list.numel() else [[]] * batch
    selected_rows = selected_index.reshape(batch, -1).tolist()
    flat_positions, flat_index = positions.view(-1), retrieve_index.view(-1)
    next_token = retrieve_next_token.view(batch, num_tokens)
    next_sibling = retrieve_next_sibling.view(batch, num_tokens)
    offset = 0
    for b in range(batch):
        parents = tree_parents(selected_rows[b][: num_tokens - 1], parent_rows[b], topk)
        visible = torch.zeros(num_tokens, num_tokens, dtype=tree_mask.dtype)
        visible[:, 0] = 1
        node_depth = [0] * num_tokens
        last_child: dict[int, int] = {}
        for node in range(1, num_tokens):
            parent = parents[node - 1]
            if parent >= 0:
                if parent in last_child:
                    next_sibling[b, last_child[parent]] = node
                else:
                    next_token[b, parent] = node
                last_child[parent] = node
            ancestor, steps = node, 0
            while ancestor > 0 and steps < depth:
                visible[node, ancestor] = 1
                ancestor = parents[ancestor - 1]
                steps += 1
            node_depth[node] = steps
        columns = num_tokens + (lengths[b] if full_mask else 0)
        part = tree_mask[offset : offset + num_tokens * columns].view(num_tokens, columns)
        part[:, columns - num_tokens :] = visible
        offset += num_tokens * columns
        first = b * num_tokens
        flat_index[first : first + num_tokens] = torch.arange(first, first + num_tokens)
        flat_positions[first : first + num_tokens] = torch.tensor(node_depth) + lengths[b]


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree as long as a child equals the target's choice; write the results in place.

    Args:
        predicts: [batch * num_tokens], the target's choice at every accepted node.
        accept_index: [batch, depth + 1], flat numbers of the accepted nodes, root first; the rest stays as it is.
        accept_token_num: [batch], accepted draft tokens (the root not counted).
        candidates: [batch, num_tokens], token of each node.
        retrieve_index: [batch, num_tokens], number of each node in the flattened batch.
        retrieve_next_token: [batch, num_tokens], first child or -1.
        retrieve_next_sibling: [batch, num_tokens], next child of the same parent or -1.
        target_predict: [batch * num_tokens] or [batch, num_tokens], the target's greedy token at each node.
    """
    batch, _ = candidates.shape
    max_accepted = accept_index.shape[1] - 1
    choice = target_predict.reshape(-1).tolist()
    tokens, index = candidates.tolist(), retrieve_index.view(batch, -1).tolist()
    child, sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    flat_predicts = predicts.view(-1)
    for b in range(batch):
        node, path = 0, [index[b][0]]
        while len(path) <= max_accepted:
            wanted = choice[path[-1]]
            node = child[b][node]
            while node != -1 and tokens[b][node] != wanted:
                node = sibling[b][node]
            if node == -1:
                break
            path.append(index[b][node])
        accept_index[b, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[b] = len(path) - 1
        for number in path:
            flat_predicts[number] = choice[number]
