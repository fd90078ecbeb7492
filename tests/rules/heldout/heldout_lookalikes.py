"""Code that looks like a tree walk and is none, for the detector's held-out test.

``where`` says how it gets into the install: "sampler" replaces the accept step (so it is what decides), "beside" is
called from the sampler on the same tensors, "drafter" is called by the runner where drafts are proposed, "plain" is a
module in vLLM's own tree that the rest of vLLM would call.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

Where = Literal["sampler", "beside", "drafter", "plain"]


@dataclass(frozen=True)
class LookAlike:
    """``named``: a report must name it, as dismissed or in the list of (chain) verifiers."""

    name: str
    entry: str
    source: str
    where: Where
    named: bool = False


def _like(name: str, entry: str, where: Where, source: str, *, named: bool = False) -> LookAlike:
    return LookAlike(name, entry, dedent(source), where, named)


LOOKALIKES = (
    _like(
        "chain-in-tree-words",
        "tree_accept",
        "sampler",
        """
        import torch
        from vllm.triton_utils import tl, triton


        @triton.jit
        def _tree_walk_kernel(accepted_path_ptr, node_tokens_ptr, parent_argmax_ptr, child_map_ptr, num_nodes, width):
            tree = tl.program_id(0)
            subtree_alive = True
            for child in range(num_nodes):
                if subtree_alive:
                    leaf = tl.load(node_tokens_ptr + tree * num_nodes + child)
                    root = tl.load(parent_argmax_ptr + tree * num_nodes + child)
                    tl.store(accepted_path_ptr + tree * width + child, root)
                    if leaf != root:
                        subtree_alive = False


        def tree_accept(draft, best, t):
            out = draft.new_full((draft.shape[0], draft.shape[1] + 1), -1)
            _tree_walk_kernel[(draft.shape[0],)](out, draft, best, None, draft.shape[1], out.shape[1])
            return out
        """,
        named=True,
    ),
    _like(
        "chain-first-mismatch-argmax",
        "follow_verified_tree",
        "sampler",
        """
        import torch


        def follow_verified_tree(draft, best, t):
            mismatch = torch.nn.functional.pad(draft[:, 1:] != best[:, :-1], (0, 1), value=True)
            stop = mismatch.int().argmax(dim=1, keepdim=True)
            column = torch.arange(best.shape[1], device=best.device)
            return torch.where(column <= stop, best, -1)
        """,
        named=True,
    ),
    _like(
        "chain-searchsorted-stop",
        "clip",
        "sampler",
        """
        import torch


        def clip(draft, best, t):
            wrong = (draft[:, 1:] != best[:, :-1]).cumsum(dim=1)
            length = torch.searchsorted(wrong, torch.ones_like(wrong[:, :1]))
            out = best.clone()
            out[torch.arange(best.shape[1]) > length] = -1
            return out
        """,
    ),
    _like(
        "chain-through-slot-table",
        "select",
        "sampler",
        """
        import torch
        from vllm.triton_utils import tl, triton


        @triton.jit
        def _select_kernel(out_ptr, draft_ptr, best_ptr, slot_ptr, n, width):
            r = tl.program_id(0)
            rejected = False
            for i in range(n):
                if not rejected:
                    slot = tl.load(slot_ptr + r * n + i)
                    page = tl.load(slot_ptr + slot)
                    a = tl.load(draft_ptr + page)
                    b = tl.load(best_ptr + slot)
                    tl.store(out_ptr + r * width + i, b)
                    rejected = a != b


        def select(draft, best, t):
            out = draft.new_full((draft.shape[0], draft.shape[1] + 1), -1)
            _select_kernel[(draft.shape[0],)](out, draft, best, t.slots, draft.shape[1], out.shape[1])
            return out
        """,
        named=True,
    ),
    _like(
        "chain-with-grammar-state",
        "constrained_accept",
        "sampler",
        """
        import torch


        def constrained_accept(draft, best, t):
            out = draft.new_full((draft.shape[0], draft.shape[1] + 1), -1)
            for b in range(draft.shape[0]):
                state = int(t.start_state[b])
                for i in range(1, draft.shape[1]):
                    token = int(draft[b, i])
                    wanted = int(best[b, i - 1])
                    out[b, i - 1] = wanted
                    if token != wanted:
                        break
                    state = int(t.transition[state, token])
                    if state < 0:
                        break
            return out
        """,
        named=True,
    ),
    _like(
        "chain-block-verification",
        "verify_subtree",
        "sampler",
        """
        import torch
        from vllm.triton_utils import tl, triton


        @triton.jit
        def _subtree_kernel(out_ptr, length_ptr, tok_ptr, p_ptr, q_ptr, u_ptr, n, V):
            r = tl.program_id(0)
            path = 1.0
            depth = 0
            for i in range(n):
                tok = tl.load(tok_ptr + r * n + i)
                p = tl.load(p_ptr + (r * n + i) * V + tok)
                q = tl.load(q_ptr + (r * n + i) * V + tok)
                path = tl.minimum(path * p / q, 1.0)
                u = tl.load(u_ptr + r * n + i)
                depth = tl.where(u <= path, i + 1, depth)
            tl.store(length_ptr + r, depth)


        def verify_subtree(draft, best, t):
            length = draft.new_zeros(draft.shape[0])
            _subtree_kernel[(draft.shape[0],)](
                None, length, draft, t.p, t.q, torch.rand(draft.shape), draft.shape[1], t.p.shape[-1]
            )
            return torch.where(torch.arange(best.shape[1]) <= length[:, None], best, -1)
        """,
    ),
    _like(
        "chain-cumprod-then-batch-max",
        "trim_padding",
        "sampler",
        """
        import torch


        def trim_padding(draft, best, t):
            kept = (draft[:, 1:] == best[:, :-1]).long().cumprod(dim=1).sum(dim=1)
            longest, which = kept.max(dim=0)
            t.longest_request = int(which)
            out = torch.where(torch.arange(best.shape[1]) <= kept[:, None], best, -1)
            return out[:, : int(longest) + 1]
        """,
        named=True,
    ),
    _like(
        "chain-through-ring-buffer",
        "drain",
        "sampler",
        """
        import torch


        def drain(draft, best, t):
            out = draft.new_full((draft.shape[0], draft.shape[1] + 1), -1)
            for b in range(draft.shape[0]):
                i, head = 0, int(t.head[b])
                while i < draft.shape[1]:
                    out[b, i] = best[b, i]
                    if draft[b, head] != best[b, i]:
                        break
                    head = (head + 1) % draft.shape[1]
                    i += 1
            return out
        """,
        named=True,
    ),
    _like(
        "chain-recursive",
        "resolve",
        "sampler",
        """
        import torch


        def _resolve(tokens, answers, i):
            if i >= len(tokens) or tokens[i] != answers[i]:
                return [answers[i]] if i < len(answers) else []
            return [answers[i], *_resolve(tokens, answers, i + 1)]


        def resolve(draft, best, t):
            width = draft.shape[1] + 1
            rows = [_resolve(a[1:], b, 0) for a, b in zip(draft.tolist(), best.tolist())]
            return torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        """,
    ),
    _like(
        "kmp-borders",
        "tail_match",
        "drafter",
        """
        def tail_match(context, pattern):
            border = [0] * len(pattern)
            k = 0
            for i in range(1, len(pattern)):
                while k and pattern[k] != pattern[i]:
                    k = border[k - 1]
                if pattern[k] == pattern[i]:
                    k += 1
                border[i] = k
            k = 0
            hits = []
            for i, token in enumerate(context):
                while k and pattern[k] != token:
                    k = border[k - 1]
                if pattern[k] == token:
                    k += 1
                if k == len(pattern):
                    hits.append(i)
                    k = border[k - 1]
            return hits
        """,
        named=True,
    ),
    _like(
        "union-find-of-equal-drafts",
        "share_prefixes",
        "beside",
        """
        def share_prefixes(draft, best, t):
            tokens = draft.tolist()
            boss = list(range(len(tokens)))

            def find(x):
                while boss[x] != x:
                    boss[x] = boss[boss[x]]
                    x = boss[x]
                return x

            for a in range(len(tokens)):
                for b in range(a):
                    if tokens[a] == tokens[b]:
                        boss[find(a)] = find(b)
            return [find(x) for x in range(len(tokens))]
        """,
        named=True,
    ),
    _like(
        "beam-search-backtrace",
        "roll_out",
        "drafter",
        """
        import torch


        def roll_out(scores, width):
            steps, vocab = scores.shape
            total, origin = torch.zeros(1), []
            words = []
            for s in range(steps):
                joint = (total[:, None] + scores[s]).flatten()
                total, flat = joint.topk(min(width, joint.numel()))
                origin.append((flat // vocab).tolist())
                words.append((flat % vocab).tolist())
            beam, line = int(total.argmax()), []
            for s in range(steps - 1, -1, -1):
                line.append(words[s][beam])
                beam = origin[s][beam]
            return line[::-1]
        """,
    ),
    _like(
        "suffix-automaton",
        "extend",
        "drafter",
        """
        def extend(history, length):
            jump, link, size = [{}], [-1], [0]
            last = 0
            for token in history:
                here = len(jump)
                jump.append({})
                link.append(0)
                size.append(size[last] + 1)
                p = last
                while p != -1 and token not in jump[p]:
                    jump[p][token] = here
                    p = link[p]
                if p != -1:
                    q = jump[p][token]
                    if size[q] == size[p] + 1:
                        link[here] = q
                    else:
                        copy = len(jump)
                        jump.append(dict(jump[q]))
                        link.append(link[q])
                        size.append(size[p] + 1)
                        while p != -1 and jump[p].get(token) == q:
                            jump[p][token] = copy
                            p = link[p]
                        link[q] = link[here] = copy
                last = here
            state, proposal = link[last], []
            while state > 0 and len(proposal) < length and jump[state]:
                token = min(jump[state])
                proposal.append(token)
                state = jump[state][token]
            return proposal
        """,
    ),
    _like(
        "mask-from-parents",
        "visibility",
        "beside",
        """
        import torch


        def visibility(draft, best, t):
            tree_mask = torch.zeros(*draft.shape, draft.shape[1], dtype=torch.bool)
            for b, parents in enumerate(t.parent.tolist()):
                for node in range(len(parents)):
                    ancestor = node
                    while ancestor >= 0:
                        tree_mask[b, node, ancestor] = True
                        ancestor = parents[ancestor]
            return tree_mask
        """,
    ),
    _like(
        "best-first-build",
        "sprout",
        "drafter",
        """
        import heapq

        import torch


        def sprout(logits, budget):
            values, ids = logits.log_softmax(-1).topk(4, dim=-1)
            values, ids = values.tolist(), ids.tolist()
            queue = [(-values[0][0], 0, 0, 0)]
            tokens, parents, child_map = [-1], [-1], [{}]
            while queue and len(tokens) <= budget:
                cost, depth, rank, up = heapq.heappop(queue)
                node = len(tokens)
                tokens.append(ids[depth][rank])
                parents.append(up)
                child_map.append({})
                child_map[up][ids[depth][rank]] = node
                if rank + 1 < 4:
                    heapq.heappush(queue, (cost + values[depth][rank] - values[depth][rank + 1], depth, rank + 1, up))
                if depth + 1 < len(ids):
                    heapq.heappush(queue, (cost - values[depth + 1][0], depth + 1, 0, node))
            return tokens, parents, child_map
        """,
    ),
    _like(
        "syntax-tree-comparison",
        "same_shape",
        "plain",
        """
        def same_shape(left, right):
            if left.token != right.token or len(left.children) != len(right.children):
                return False
            return all(same_shape(a, b) for a, b in zip(left.children, right.children))


        def deepest_common(left, right):
            depth = 0
            while left is not None and right is not None and left.token == right.token:
                depth += 1
                left = left.children[0] if left.children else None
                right = right.children[0] if right.children else None
            return depth
        """,
    ),
    _like(
        "json-path-walk",
        "settle_arguments",
        "plain",
        """
        def settle_arguments(schema, tokens, expected):
            node, taken = schema, 0
            for token, want in zip(tokens, expected):
                if token != want:
                    break
                node = node.get("properties", {}).get(token)
                if node is None:
                    break
                taken += 1
            return taken
        """,
    ),
    _like(
        "priority-heap",
        "sift",
        "plain",
        """
        def sift(heap, root):
            item = heap[root]
            child = 2 * root + 1
            while child < len(heap):
                if child + 1 < len(heap) and heap[child + 1].priority < heap[child].priority:
                    child += 1
                if heap[child].priority >= item.priority:
                    break
                heap[root] = heap[child]
                root, child = child, 2 * child + 1
            heap[root] = item
        """,
    ),
    _like(
        "radix-prefix-cache",
        "match_prefix",
        "plain",
        """
        class Edge:
            def __init__(self, label, block):
                self.label, self.block, self.below = label, block, {}


        def match_prefix(root, prompt):
            node, i, blocks = root, 0, []
            while i < len(prompt) and prompt[i] in node.below:
                node = node.below[prompt[i]]
                for a, b in zip(node.label, prompt[i:]):
                    if a != b:
                        return blocks
                blocks.append(node.block)
                i += len(node.label)
            return blocks
        """,
    ),
    _like(
        "grammar-prefix-of-drafts",
        "valid_prefix",
        "beside",
        """
        def valid_prefix(draft, best, t):
            lengths = []
            for b, tokens in enumerate(draft.tolist()):
                state, n = int(t.start_state[b]), 0
                for token in tokens[1:]:
                    state = int(t.transition[state, token])
                    if state == t.dead_state:
                        break
                    n += 1
                lengths.append(n)
            return lengths
        """,
        named=True,
    ),
    _like(
        "trie-of-bad-words",
        "banned",
        "beside",
        """
        def banned(draft, best, t):
            masks = []
            for tokens in draft.tolist():
                blocked = set()
                for start in range(len(tokens)):
                    node = t.bad_words
                    for token in tokens[start:]:
                        if token not in node:
                            break
                        node = node[token]
                    else:
                        blocked |= {token for token, below in node.items() if below is None}
                masks.append(blocked)
            return masks
        """,
        named=True,
    ),
    _like(
        "draft-alignment-table",
        "edit_distance",
        "beside",
        """
        import numpy as np


        def edit_distance(draft, best, t):
            a, b = draft[0].tolist(), best[0].tolist()
            cost = np.zeros((len(a) + 1, len(b) + 1), dtype=np.int64)
            cost[:, 0] = np.arange(len(a) + 1)
            cost[0] = np.arange(len(b) + 1)
            for i in range(1, len(a) + 1):
                for j in range(1, len(b) + 1):
                    swap = cost[i - 1, j - 1] + (a[i - 1] != b[j - 1])
                    cost[i, j] = min(swap, cost[i - 1, j] + 1, cost[i, j - 1] + 1)
            return int(cost[-1, -1])
        """,
    ),
    _like(
        "acceptance-histogram",
        "count_hits",
        "beside",
        """
        import torch


        def count_hits(draft, best, t):
            hits = (draft[:, 1:] == best[:, :-1]).float()
            prefix = hits.cumprod(dim=1)
            t.by_position = t.by_position + prefix.sum(dim=0)
            t.best_position = int(prefix.mean(dim=0).argmax())
            t.best_rate = float(prefix.mean(dim=0).max())
            return prefix.sum(dim=1)
        """,
    ),
    _like(
        "linked-kv-blocks",
        "cached_run",
        "plain",
        """
        def cached_run(table, first, tokens, block_size):
            block, run = first, 0
            while block != -1 and run < len(tokens):
                if table.tokens[block] != tokens[run : run + block_size]:
                    break
                run += block_size
                block = table.following[block]
            return run
        """,
    ),
)
