"""Tree walks as different people would write them, for the detector's held-out test.

Every module defines one function ``(draft, best, t) -> tokens``. Node 0 is the root (the last committed token).

- ``draft`` [B, N] int64: the token of each node; ``best`` [B, N] int64: the target's token after each node
- ``t``: the tree. ``parent``, ``child`` (first child), ``sibling`` (next sibling), ``depth`` [B, N] int64, -1 for none;
  ``mask`` [B, N, N] bool, ancestor or self; ``paths`` [B, P, D] int64, nodes from the root to each leaf, -1 padded;
  ``tries``: per request, per node, a dict from token to child; ``kids`` [B, N, K] int64, -1 padded
- returned [B, D + 1] int64: accepted tokens and the bonus token, -1 padded

Parents come before their children. Siblings have different tokens. ``test_heldout`` runs all that need no GPU against
one plain reference, so that what is called a tree walk here is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import dedent


@dataclass(frozen=True)
class Walk:
    """``source`` is the module; ``helpers`` are more modules that it imports from its own package as ``.name``."""

    name: str
    entry: str
    source: str
    helpers: dict[str, str] = field(default_factory=dict)
    gpu: bool = False


def _walk(name: str, entry: str, source: str, *, gpu: bool = False, **helpers: str) -> Walk:
    return Walk(name, entry, dedent(source), {key: dedent(text) for key, text in helpers.items()}, gpu)


WALKS = (
    _walk(
        "triton-child-sibling-terse",
        "pack",
        """
        import torch
        from vllm.triton_utils import tl, triton


        @triton.jit
        def _k(o, a, b, c, d, s, n, m):
            r = tl.program_id(0)
            a += r * n
            b += r * n
            c += r * n
            d += r * n
            z = tl.load(b)
            p = 0
            w = 0
            q = tl.load(c)
            while q >= 0:
                if tl.load(a + q) == z:
                    tl.store(o + r * m + w, z)
                    w += 1
                    p = q
                    z = tl.load(b + p)
                    q = tl.load(c + p)
                else:
                    q = tl.load(d + q)
            tl.store(o + r * m + w, z)


        def pack(draft, best, t):
            rows, n = draft.shape
            out = draft.new_full((rows, t.paths.shape[-1] + 1), -1)
            _k[(rows,)](out, draft, best, t.child, t.sibling, 0, n, out.shape[1])
            return out
        """,
        gpu=True,
    ),
    _walk(
        "triton-parent-compare-block",
        "resample_rows",
        """
        import torch
        from vllm.triton_utils import tl, triton


        @triton.jit
        def _resample_kernel(out_ptr, draft_ptr, best_ptr, up_ptr, N, width, MAX: tl.constexpr, BLOCK: tl.constexpr):
            req = tl.program_id(0)
            lane = tl.arange(0, BLOCK)
            ok = lane < N
            ids = tl.load(draft_ptr + req * N + lane, mask=ok, other=-2)
            up = tl.load(up_ptr + req * N + lane, mask=ok, other=-2)
            here = 0
            for step in range(MAX):
                want = tl.load(best_ptr + req * N + here)
                tl.store(out_ptr + req * width + step, want, mask=here >= 0)
                found = tl.max(tl.where((up == here) & (ids == want), lane, -1), axis=0)
                here = tl.where(found >= 0, found, -1)


        def resample_rows(draft, best, t):
            B, N = draft.shape
            out = torch.full((B, t.paths.shape[-1] + 1), -1, dtype=draft.dtype, device=draft.device)
            _resample_kernel[(B,)](
                out, draft, best, t.parent, N, out.shape[1], MAX=out.shape[1], BLOCK=triton.next_power_of_2(N)
            )
            return out
        """,
        gpu=True,
    ),
    _walk(
        "generator-over-dicts",
        "collect",
        """
        import torch


        def _hops(table, answers):
            spot = 0
            yield spot
            while (spot := table[spot].get(answers[spot], -1)) != -1:
                yield spot


        def collect(draft, best, t):
            result = draft.new_full((draft.shape[0], t.paths.shape[-1] + 1), -1)
            for row, (table, answers) in enumerate(zip(t.tries, best.tolist())):
                line = [answers[spot] for spot in _hops(table, answers)]
                result[row, : len(line)] = torch.tensor(line)
            return result
        """,
    ),
    _walk(
        "closure-recursion",
        "gather_outputs",
        """
        import torch


        def gather_outputs(draft, best, t):
            output = torch.full((draft.size(0), t.paths.size(-1) + 1), -1, dtype=torch.long)
            for i in range(draft.size(0)):
                tokens, answers, first, following = (x[i].tolist() for x in (draft, best, t.child, t.sibling))

                def descend(node, sofar):
                    sofar = [*sofar, answers[node]]

                    def scan(candidate):
                        if candidate < 0:
                            return sofar
                        if tokens[candidate] == answers[node]:
                            return descend(candidate, sofar)
                        return scan(following[candidate])

                    return scan(first[node])

                line = descend(0, [])
                output[i, : len(line)] = torch.as_tensor(line)
            return output
        """,
    ),
    _walk(
        "frontier-sets",
        "sweep",
        """
        import torch


        def sweep(draft, best, t):
            B, _ = draft.shape
            answer = torch.full((B, t.paths.shape[2] + 1), -1)
            for b in range(B):
                tok, nxt, kids = draft[b].tolist(), best[b].tolist(), t.kids[b].tolist()
                wave, level = {0}, 0
                while wave:
                    for u in wave:
                        answer[b, level] = nxt[u]
                    wave = {v for u in wave for v in kids[u] if v >= 0 and tok[v] == nxt[u]}
                    level += 1
            return answer
        """,
    ),
    _walk(
        "pointer-doubling",
        "settle",
        """
        import math

        import torch


        def settle(draft, best, t):
            hop = t.parent.clamp(min=0)
            good = draft.eq(best.gather(1, hop))
            good[:, 0] = True
            for _ in range(max(1, math.ceil(math.log2(draft.shape[1])))):
                good = good & good.gather(1, hop)
                hop = hop.gather(1, hop)
            deepest = torch.where(good, t.depth, -1).argmax(1)
            chosen = t.mask[torch.arange(draft.shape[0]), deepest]
            out = torch.full((draft.shape[0], t.paths.shape[-1] + 1), -1, dtype=draft.dtype)
            rows, nodes = chosen.nonzero(as_tuple=True)
            out[rows, t.depth[rows, nodes]] = best[rows, nodes]
            return out
        """,
    ),
    _walk(
        "ancestor-mask-argmax-depth",
        "finalize_logprobs",
        """
        import torch


        def finalize_logprobs(draft, best, t):
            agrees = torch.gather(best, 1, t.parent.clamp_min(0)) == draft
            agrees = agrees | (t.parent < 0)
            alive = (agrees.unsqueeze(1) | ~t.mask).all(dim=-1)
            tip = (alive * (t.depth + 1)).argmax(dim=-1)
            lineage = t.mask.gather(1, tip.view(-1, 1, 1).expand(-1, 1, draft.shape[1])).squeeze(1)
            out = draft.new_full((draft.shape[0], t.paths.shape[-1] + 2), -1)
            slot = torch.where(lineage, t.depth, out.shape[1] - 1)
            out.scatter_(1, slot, best)
            return out[:, :-1]
        """,
    ),
    _walk(
        "ancestor-mask-matmul-mismatches",
        "reduce_rows",
        """
        import torch


        def reduce_rows(draft, best, t):
            wrong = (draft != best.gather(-1, t.parent.clamp(min=0))).float()
            wrong[:, 0] = 0.0
            debt = torch.einsum("bij,bj->bi", t.mask.float(), wrong)
            score = torch.where(debt < 0.5, t.depth.float(), float("-inf"))
            _, tip = score.max(dim=-1)
            width = t.paths.shape[-1] + 1
            out = draft.new_full((len(draft), width), -1)
            for b, leaf in enumerate(tip.tolist()):
                nodes = t.mask[b, leaf].nonzero().flatten()
                out[b, : len(nodes)] = best[b, nodes]
            return out
        """,
    ),
    _walk(
        "paths-cummin-terse",
        "f",
        """
        import torch


        def f(x, y, z):
            p = z.paths
            v = p.ge(0)
            q = p.clamp(min=0).flatten(1)
            i = x.gather(1, q).view_as(p)
            j = y.gather(1, q).view_as(p)
            e = (i[..., 1:].eq(j[..., :-1]) & v[..., 1:]).long().cummin(-1).values
            n = e.sum(-1)
            m, a = n.max(-1)
            r = j[torch.arange(len(x)), a]
            k = torch.arange(p.shape[-1]) <= m[:, None]
            return torch.nn.functional.pad(torch.where(k, r, -1), (0, 1), value=-1)
        """,
    ),
    _walk(
        "unrolled-where",
        "blend",
        """
        import torch


        def _pick(draft, best, kids, node):
            options = kids.gather(1, node[:, None, None].expand(-1, 1, kids.shape[2])).squeeze(1)
            token = best.gather(1, node[:, None])
            same = (draft.gather(1, options.clamp(min=0)) == token) & (options >= 0)
            return torch.where(same.any(1), options.gather(1, same.int().argmax(1, keepdim=True)).squeeze(1), node)


        def blend(draft, best, t):
            n0 = torch.zeros(draft.shape[0], dtype=torch.long, device=draft.device)
            n1 = _pick(draft, best, t.kids, n0)
            n2 = torch.where(n1 != n0, _pick(draft, best, t.kids, n1), n1)
            n3 = torch.where(n2 != n1, _pick(draft, best, t.kids, n2), n2)
            n4 = torch.where(n3 != n2, _pick(draft, best, t.kids, n3), n3)
            n5 = torch.where(n4 != n3, _pick(draft, best, t.kids, n4), n4)
            n6 = torch.where(n5 != n4, _pick(draft, best, t.kids, n5), n5)
            nodes = torch.stack([n0, n1, n2, n3, n4, n5, n6], dim=1)
            fresh = torch.cat([torch.ones_like(nodes[:, :1], dtype=torch.bool), nodes[:, 1:] != nodes[:, :-1]], dim=1)
            tokens = torch.where(fresh, best.gather(1, nodes), -1)
            return tokens[:, : t.paths.shape[-1] + 1]
        """,
    ),
    _walk(
        "walrus-helper-in-another-file",
        "emit",
        """
        import numpy as np
        import torch

        from .cellar import rung


        def emit(draft, best, t):
            d, y = draft.cpu().numpy(), best.cpu().numpy()
            up = t.parent.cpu().numpy()
            page = np.full((len(d), t.paths.shape[-1] + 1), -1, dtype=np.int64)
            for b in range(len(d)):
                here, col = 0, 0
                page[b, col] = y[b, here]
                while (here := rung(up[b], d[b], here, y[b, here])) >= 0:
                    col += 1
                    page[b, col] = y[b, here]
            return torch.from_numpy(page).to(draft.device)
        """,
        cellar="""
        import numpy as np


        def rung(up, ids, here, token):
            spots = np.flatnonzero(np.logical_and(up == here, ids == token))
            return int(spots[0]) if spots.size else -1
        """,
    ),
    _walk(
        "searchsorted-edges",
        "compact_batch",
        """
        import torch

        STRIDE = 1 << 20


        def compact_batch(draft, best, t):
            keys = t.parent * STRIDE + draft
            keys[:, 0] = -1
            keys, order = keys.sort(dim=1)
            at = torch.zeros_like(draft[:, :1])
            live = torch.ones_like(at, dtype=torch.bool)
            columns = []
            for _ in range(t.paths.shape[-1] + 1):
                token = best.gather(1, at)
                columns.append(torch.where(live, token, -1))
                probe = at * STRIDE + token
                where = torch.searchsorted(keys, probe).clamp(max=keys.shape[1] - 1)
                live = live & (keys.gather(1, where) == probe)
                at = torch.where(live, order.gather(1, where), at)
            return torch.cat(columns, dim=1)
        """,
    ),
    _walk(
        "cursor-class",
        "flush",
        """
        import torch


        class Cursor:
            __slots__ = ("_answers", "_first", "_next", "_tokens", "node")

            def __init__(self, tokens, answers, first, following):
                self._tokens, self._answers = tokens, answers
                self._first, self._next = first, following
                self.node = 0

            @property
            def token(self):
                return self._answers[self.node]

            def advance(self):
                candidate = self._first[self.node]
                while candidate != -1:
                    if self._tokens[candidate] == self.token:
                        self.node = candidate
                        return True
                    candidate = self._next[candidate]
                return False


        def flush(draft, best, t):
            rows = []
            for columns in zip(draft.tolist(), best.tolist(), t.child.tolist(), t.sibling.tolist()):
                cursor = Cursor(*columns)
                row = [cursor.token]
                while cursor.advance():
                    row.append(cursor.token)
                rows.append(row + [-1] * (t.paths.shape[-1] + 1 - len(row)))
            return torch.tensor(rows, device=draft.device)
        """,
    ),
    _walk(
        "node-objects",
        "render",
        """
        from __future__ import annotations

        from dataclasses import dataclass, field

        import torch


        @dataclass
        class Item:
            label: int
            row: int
            below: list[Item] = field(default_factory=list)


        def _grow(tokens, parents):
            items = [Item(label, row) for row, label in enumerate(tokens)]
            for item, parent in zip(items[1:], parents[1:]):
                items[parent].below.append(item)
            return items[0]


        def render(draft, best, t):
            out = torch.full((len(draft), t.paths.shape[-1] + 1), -1)
            for b, (tokens, parents) in enumerate(zip(draft.tolist(), t.parent.tolist())):
                item, n = _grow(tokens, parents), 0
                while item is not None:
                    wanted = int(best[b, item.row])
                    out[b, n] = wanted
                    n += 1
                    item = next((x for x in item.below if x.label == wanted), None)
            return out
        """,
    ),
    _walk(
        "bitset-ancestors",
        "squeeze",
        """
        import torch


        def squeeze(draft, best, t):
            lines = []
            for b in range(draft.shape[0]):
                lineage = [sum(1 << j for j, bit in enumerate(row) if bit) for row in t.mask[b].tolist()]
                match = 1
                for j, (token, up) in enumerate(zip(draft[b].tolist(), t.parent[b].tolist())):
                    if up >= 0 and token == int(best[b, up]):
                        match |= 1 << j
                whole = [bits for bits in lineage if bits & ~match == 0]
                longest = max(whole, key=lambda bits: bits.bit_count())
                line = []
                while longest:
                    low = longest & -longest
                    line.append(int(best[b, low.bit_length() - 1]))
                    longest ^= low
                lines.append(line + [-1] * (t.paths.shape[-1] + 1 - len(line)))
            return torch.tensor(lines)
        """,
    ),
    _walk(
        "adjacency-power",
        "propagate",
        """
        import torch


        def propagate(draft, best, t):
            n = draft.shape[1]
            edge = t.parent.unsqueeze(1) == torch.arange(n, device=draft.device).view(1, n, 1)
            edge &= best.unsqueeze(2) == draft.unsqueeze(1)
            edge = edge.to(torch.float32)
            state = torch.zeros(draft.shape[0], 1, n, device=draft.device)
            state[:, :, 0] = 1.0
            steps = []
            for _ in range(t.paths.shape[-1] + 1):
                token = (state.squeeze(1) * best).sum(-1).long()
                steps.append(torch.where(state.squeeze(1).sum(-1) > 0, token, -1))
                state = torch.bmm(state, edge)
            return torch.stack(steps, dim=1)
        """,
    ),
    _walk(
        "parent-dp-numpy",
        "tabulate",
        """
        import numpy as np
        import torch


        def tabulate(draft, best, t):
            ids, want, up = (np.asarray(a) for a in (draft, best, t.parent))
            B, N = ids.shape
            reach = np.zeros((B, N), dtype=np.int32)
            reach[:, 0] = 1
            rows = np.arange(B)
            for j in range(1, N):
                p = up[:, j]
                good = (p >= 0) & (ids[:, j] == want[rows, p]) & (reach[rows, p] > 0)
                reach[:, j] = np.where(good, reach[rows, p] + 1, 0)
            out = np.full((B, t.paths.shape[-1] + 1), -1, dtype=np.int64)
            for b in range(B):
                j = int(reach[b].argmax())
                for col in range(reach[b, j] - 1, -1, -1):
                    out[b, col] = want[b, j]
                    j = up[b, j]
            return torch.from_numpy(out)
        """,
    ),
    _walk(
        "reduce-lambda",
        "fold",
        """
        from functools import reduce

        import torch


        def fold(draft, best, t):
            depth = t.paths.shape[-1] + 1
            rows = []
            for maps, goal in zip(t.tries, best.tolist()):
                trail = reduce(
                    lambda acc, _: acc + [maps[acc[-1]][goal[acc[-1]]]] if goal[acc[-1]] in maps[acc[-1]] else acc,
                    range(depth),
                    [0],
                )
                rows.append([goal[i] for i in trail] + [-1] * (depth - len(trail)))
            return torch.tensor(rows)
        """,
    ),
    _walk(
        "edge-dictionary",
        "relabel",
        """
        import torch


        def relabel(draft, best, t):
            out = torch.full((draft.shape[0], t.paths.shape[-1] + 1), -1)
            for b in range(draft.shape[0]):
                edges = {
                    (parent, token): i
                    for i, (parent, token) in enumerate(zip(t.parent[b].tolist(), draft[b].tolist()))
                    if i
                }
                node, goal = 0, best[b].tolist()
                for n in range(out.shape[1]):
                    out[b, n] = goal[node]
                    try:
                        node = edges[node, goal[node]]
                    except KeyError:
                        break
            return out
        """,
    ),
    _walk(
        "depth-first-stack",
        "unwind",
        """
        import torch


        def unwind(draft, best, t):
            answer = []
            for b in range(draft.shape[0]):
                pile, record = [(0, (int(best[b, 0]),))], ()
                while pile:
                    top, line = pile.pop()
                    if len(line) > len(record):
                        record = line
                    for below in t.kids[b, top].tolist():
                        if below >= 0 and draft[b, below].item() == line[-1]:
                            pile.append((below, (*line, int(best[b, below]))))
                answer.append(record + (-1,) * (t.paths.shape[-1] + 1 - len(record)))
            return torch.tensor(answer)
        """,
    ),
    _walk(
        "batched-candidates",
        "merge_bonus",
        """
        import torch


        @torch.inference_mode()
        def merge_bonus(draft, best, t):
            B = draft.shape[0]
            arange = torch.arange(B, device=draft.device)
            current = arange.new_zeros(B)
            done = torch.zeros(B, dtype=torch.bool, device=draft.device)
            merged = draft.new_full((B, t.paths.shape[-1] + 1), -1)
            for column in range(merged.shape[1]):
                bonus = best[arange, current]
                merged[:, column] = torch.where(done, merged[:, column], bonus)
                slate = t.kids[arange, current]
                agree = (draft[arange[:, None], slate.clamp(min=0)] == bonus[:, None]) & (slate >= 0)
                done = done | ~agree.any(dim=1)
                current = slate[arange, agree.to(torch.int8).argmax(dim=1)].clamp(min=0)
                if bool(done.all()):
                    break
            return merged
        """,
    ),
    _walk(
        "level-order-segments",
        "stratify",
        """
        import torch


        def stratify(draft, best, t):
            alive = torch.zeros_like(draft, dtype=torch.bool)
            alive[:, 0] = True
            out = draft.new_full((draft.shape[0], t.paths.shape[-1] + 1), -1)
            out[:, 0] = best[:, 0]
            matched = draft == best.gather(1, t.parent.clamp(min=0))
            for level in range(1, out.shape[1]):
                inherited = alive.gather(1, t.parent.clamp(min=0))
                alive = torch.where(t.depth == level, inherited & matched, alive)
                here = alive & (t.depth == level)
                token = best.gather(1, here.int().argmax(1, keepdim=True)).squeeze(1)
                out[:, level] = torch.where(here.any(1), token, -1)
            return out
        """,
    ),
    _walk(
        "callbacks-over-three-files",
        "dispatch",
        """
        import torch

        from .lookup import make_lookup
        from .loop import iterate


        def dispatch(draft, best, t):
            rows = [
                iterate(make_lookup(kids, tokens), answers, limit=t.paths.shape[-1] + 1)
                for kids, tokens, answers in zip(t.kids.tolist(), draft.tolist(), best.tolist())
            ]
            return torch.tensor(rows)
        """,
        lookup="""
        def make_lookup(kids, tokens):
            def lookup(node, token):
                for kid in kids[node]:
                    if kid >= 0 and tokens[kid] == token:
                        return kid
                return None

            return lookup
        """,
        loop="""
        def iterate(lookup, answers, limit):
            row, node = [], 0
            while node is not None and len(row) < limit:
                row.append(answers[node])
                node = lookup(node, answers[node])
            return row + [-1] * (limit - len(row))
        """,
    ),
    _walk(
        "compiled-loop-numba",
        "normalise",
        """
        import numpy as np
        import torch

        try:
            from numba import njit
        except ImportError:
            def njit(function):
                return function


        @njit
        def _normalise(ids, want, up, out):
            for b in range(ids.shape[0]):
                h = 0
                n = 0
                out[b, 0] = want[b, 0]
                for j in range(1, ids.shape[1]):
                    if up[b, j] != h:
                        continue
                    if ids[b, j] != want[b, h]:
                        continue
                    h = j
                    n += 1
                    out[b, n] = want[b, h]


        def normalise(draft, best, t):
            out = np.full((draft.shape[0], t.paths.shape[-1] + 1), -1, dtype=np.int64)
            _normalise(draft.numpy(), best.numpy(), t.parent.numpy(), out)
            return torch.from_numpy(out)
        """,
    ),
    _walk(
        "sentinel-iterator",
        "stream",
        """
        from itertools import chain, islice, repeat

        import torch


        class _Feed:
            def __init__(self, trie, said):
                self.trie, self.said, self.at = trie, said, 0

            def __call__(self):
                if self.at is None:
                    return -1
                token = self.said[self.at]
                self.at = self.trie[self.at].get(token)
                return token


        def stream(draft, best, t):
            width = t.paths.shape[-1] + 1
            return torch.tensor(
                [
                    list(islice(chain(iter(_Feed(trie, said), -1), repeat(-1)), width))
                    for trie, said in zip(t.tries, best.tolist())
                ]
            )
        """,
    ),
)

#: Walks that accept by chance (temperature above 0): no reference to run them against, the shape is what counts.
RANDOM_WALKS = (
    _walk(
        "sibling-residual-sampling",
        "mix",
        """
        import torch


        def mix(draft, best, t):
            out = draft.new_full((draft.shape[0], t.paths.shape[-1] + 1), -1)
            for b in range(draft.shape[0]):
                spot, n = 0, 0
                while True:
                    law = t.target_probs[b, spot].clone()
                    child = int(t.child[b, spot])
                    while child >= 0:
                        token = int(draft[b, child])
                        if torch.rand(()) < law[token]:
                            break
                        law[token] = 0
                        law /= law.sum()
                        child = int(t.sibling[b, child])
                    if child < 0:
                        out[b, n] = torch.multinomial(law, 1)
                        break
                    out[b, n] = draft[b, child]
                    spot, n = child, n + 1
            return out
        """,
    ),
    _walk(
        "gumbel-tree-triton",
        "noise_rows",
        """
        import torch
        from vllm.triton_utils import tl, triton


        @triton.jit
        def _noise_kernel(o_ptr, tok_ptr, p_ptr, q_ptr, u_ptr, lo_ptr, hi_ptr, N, V, W):
            r = tl.program_id(0)
            x = 0
            count = 0
            going = True
            while going:
                lo = tl.load(lo_ptr + r * N + x)
                hi = tl.load(hi_ptr + r * N + x)
                going = False
                y = x
                for c in range(lo, hi):
                    token = tl.load(tok_ptr + r * N + c)
                    p = tl.load(p_ptr + (r * N + x) * V + token)
                    q = tl.load(q_ptr + r * N + c)
                    u = tl.load(u_ptr + r * N + c)
                    if (not going) and (p >= u * q):
                        tl.store(o_ptr + r * W + count, token)
                        count += 1
                        y = c
                        going = True
                x = y


        def noise_rows(draft, best, t):
            out = draft.new_full((draft.shape[0], t.paths.shape[-1] + 1), -1)
            _noise_kernel[(draft.shape[0],)](
                out, draft, t.target_probs, t.draft_probs, torch.rand_like(t.draft_probs), t.first, t.last,
                draft.shape[1], t.target_probs.shape[-1], out.shape[1],
            )
            return out
        """,
        gpu=True,
    ),
)
