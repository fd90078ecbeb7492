"""Acceptance written in many ways, under names that say nothing: walks through trees, chains, and what only looks
like a walk.

Each entry is the source of a module that defines ``accept(...)``; rules.examples puts it into a miniature install."""

from __future__ import annotations

from textwrap import dedent


def _all(**sources: str) -> dict[str, str]:
    return {name.replace("_", "-"): dedent(text).lstrip() for name, text in sources.items()}


#: name -> source; every one of them accepts along a tree
WALKS = _all(
    dict_of_children="""
        def accept(a, b):
            x, out = 0, [0]
            t = int(b[x])
            while t in a[x]:
                x = a[x][t]
                out.append(x)
                t = int(b[x])
            return out, t
    """,
    child_lookup_with_get="""
        def accept(a, b):
            x = 0
            out = []
            while True:
                n = a[x].get(int(b[x]))
                if n is None:
                    break
                out.append(n)
                x = n
            return out
    """,
    dict_by_pair="""
        def accept(edges, b):
            x, out = 0, []
            while (x, int(b[x])) in edges:
                x = edges[(x, int(b[x]))]
                out.append(x)
            return out
    """,
    key_error="""
        def accept(a, b):
            x, out = 0, []
            try:
                while True:
                    x = a[x][b[x].item()]
                    out.append(x)
            except KeyError:
                return out
    """,
    sampled_at_each_node="""
        def draw(row, temperature):
            return int((row / temperature).softmax(-1).multinomial(1))


        def accept(kids, logits, temperature):
            at, kept = 0, []
            token = draw(logits[at], temperature)
            while token in kids[at]:
                at = kids[at][token]
                kept.append(at)
                token = draw(logits[at], temperature)
            return kept, token
    """,
    triton_child_and_sibling="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(p0, p1, p2, p3, p4, n, S: tl.constexpr):
            r = tl.program_id(0)
            last = r * n
            for _ in range(1, S):
                c = tl.load(p1 + last)
                hit = -1
                while c != -1:
                    t = tl.load(p0 + c)
                    g = tl.load(p3 + last)
                    if t == g:
                        tl.store(p4 + r * S + _, c)
                        hit = c
                        c = -1
                    else:
                        c = tl.load(p2 + c)
                if hit != -1:
                    last = hit


        def accept(tokens, first, sibling, target, out, n):
            k[(out.shape[0],)](tokens, first, sibling, target, out, n, out.shape[1])
    """,
    triton_child_table="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(tok, kid, tgt, out, cnt, W: tl.constexpr, S: tl.constexpr):
            r = tl.program_id(0)
            u = 0
            n = 0
            go = True
            for d in range(S):
                if go:
                    want = tl.load(tgt + r * S + u)
                    nxt = -1
                    for w in tl.static_range(W):
                        c = tl.load(kid + (r * S + u) * W + w)
                        ok = (c >= 0) & (tl.load(tok + r * S + c, mask=c >= 0, other=-1) == want)
                        nxt = tl.where(ok, c, nxt)
                    if nxt >= 0:
                        tl.store(out + r * S + n, nxt)
                        n += 1
                        u = nxt
                    else:
                        go = False
            tl.store(cnt + r, n)


        def accept(tok, kid, tgt, out, cnt):
            k[(out.shape[0],)](tok, kid, tgt, out, cnt, kid.shape[-1], out.shape[1])
    """,
    triton_compares_parents="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(up, tok, tgt, out, N: tl.constexpr, DEPTH: tl.constexpr):
            r = tl.program_id(0)
            lanes = tl.arange(0, N)
            ups = tl.load(up + r * N + lanes)
            toks = tl.load(tok + r * N + lanes)
            node = 0
            alive = 1
            for d in range(DEPTH):
                want = tl.load(tgt + r * N + node)
                found = (ups == node) & (toks == want) & (alive != 0)
                nxt = tl.max(tl.where(found, lanes, -1), axis=0)
                alive = tl.where(nxt >= 0, alive, 0)
                node = tl.where(nxt >= 0, nxt, node)
                tl.store(out + r * DEPTH + d, tl.where(alive != 0, node, -1))


        def accept(up, tok, tgt, out):
            k[(out.shape[0],)](up, tok, tgt, out, up.shape[1], out.shape[1])
    """,
    triton_ratio_among_siblings="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(kid, sib, tok, p, q, u, out, V, S: tl.constexpr):
            r = tl.program_id(0)
            cur = r * S
            for d in range(S):
                c = tl.load(kid + cur)
                taken = -1
                while (c >= 0) and (taken < 0):
                    x = tl.load(tok + c)
                    px = tl.load(p + cur * V + x)
                    qx = tl.load(q + cur * V + x)
                    if tl.load(u + c) <= px / qx:
                        taken = c
                    c = tl.load(sib + c)
                if taken >= 0:
                    tl.store(out + r * S + d, taken)
                    cur = taken


        def accept(kid, sib, tok, p, q, u, out):
            k[(out.shape[0],)](kid, sib, tok, p, q, u, out, p.shape[-1], out.shape[1])
    """,
    torch_compares_parents="""
        import torch


        def accept(up, tok, tgt, depth):
            u = torch.zeros((), dtype=torch.long)
            out = []
            for _ in range(depth):
                m = (up == u) & (tok == tgt[u])
                if not m.any():
                    break
                u = m.int().argmax()
                out.append(u)
            return out
    """,
    python_scans_parents="""
        def accept(up, tok, tgt):
            here, out = 0, []
            while True:
                there = None
                for i in range(here + 1, len(up)):
                    if up[i] == here and tok[i] == tgt[here]:
                        there = i
                        break
                if there is None:
                    return out
                out.append(there)
                here = there
    """,
    python_scans_parents_with_continue="""
        def accept(up, tok, tgt, depth):
            here, out = 0, []
            for _ in range(depth):
                nxt = -1
                for i in range(1, len(up)):
                    if up[i] != here:
                        continue
                    if tok[i] != tgt[here]:
                        continue
                    nxt = i
                if nxt < 0:
                    break
                here = nxt
                out.append(nxt)
            return out
    """,
    next_over_a_generator="""
        def accept(kids, tok, tgt):
            out, x = [], 0
            while x is not None:
                x = next((c for c in kids[x] if tok[c] == tgt[x]), None)
                if x is not None:
                    out.append(x)
            return out
    """,
    objects="""
        class Item:
            def __init__(self, a, i):
                self.a, self.i, self.m = a, i, []


        def accept(top, tgt):
            out, cur = [], top
            while True:
                want = tgt[cur.i]
                for kid in cur.m:
                    if kid.a == want:
                        out.append(kid.i)
                        cur = kid
                        break
                else:
                    return out
    """,
    objects_with_method="""
        class Item:
            def __init__(self, a, i):
                self.a, self.i, self.m = a, i, {}

            def under(self, t):
                return self.m.get(t)


        def accept(top, tgt):
            out, cur = [], top
            while cur is not None:
                cur = cur.under(int(tgt[cur.i]))
                if cur is not None:
                    out.append(cur.i)
            return out
    """,
    recursion="""
        def accept(x, kids, tok, tgt):
            for c in kids[x]:
                if tok[c] == tgt[x]:
                    return [c] + accept(c, kids, tok, tgt)
            return []
    """,
    recursion_in_a_closure="""
        def accept(kids, tok, tgt):
            got = []

            def down(x):
                want = tgt[x]
                for c in kids[x]:
                    if tok[c] == want:
                        got.append(c)
                        down(c)
                        break

            down(0)
            return got
    """,
    recursion_in_a_method="""
        class S:
            def accept(self, x, left):
                if not left:
                    return x
                nxt = self.kids[x, self.tgt[x]]
                if nxt < 0:
                    return x
                return self.accept(nxt, left - 1)


        def accept(s):
            return s.accept(0, 8)
    """,
    worklist="""
        from collections import deque


        def accept(kids, tok, tgt):
            q, out = deque([0]), []
            while q:
                u = q.popleft()
                for c in kids[u]:
                    if tok[c] == tgt[u]:
                        out.append(c)
                        q.append(c)
            return out
    """,
    levels="""
        def accept(kids, tok, tgt):
            now, out = [0], []
            while now:
                later = []
                for u in now:
                    for c in kids[u]:
                        if tok[c] == tgt[u]:
                            later.append(c)
                out.extend(later)
                now = later
            return out
    """,
    stack_of_pairs="""
        def accept(kids, tok, tgt):
            best = []
            todo = [(0, [])]
            while todo:
                u, path = todo.pop()
                if len(path) > len(best):
                    best = path
                for c in kids[u]:
                    if tok[c] == tgt[u]:
                        todo.append((c, path + [c]))
            return best
    """,
    unrolled="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(kid, tok, tgt, out):
            r = tl.program_id(0) * 8
            n0 = r
            n1 = tl.load(kid + n0)
            a1 = tl.load(tok + n1) == tl.load(tgt + n0)
            n2 = tl.load(kid + n1)
            a2 = a1 & (tl.load(tok + n2) == tl.load(tgt + n1))
            n3 = tl.load(kid + n2)
            a3 = a2 & (tl.load(tok + n3) == tl.load(tgt + n2))
            tl.store(out + r, a1.to(tl.int32) + a2.to(tl.int32) + a3.to(tl.int32))


        def accept(kid, tok, tgt, out):
            k[(out.shape[0],)](kid, tok, tgt, out)
    """,
    parents_in_order="""
        def accept(up, tok, tgt):
            ok = [True] + [False] * (len(up) - 1)
            for i in range(1, len(up)):
                ok[i] = ok[up[i]] and tok[i] == tgt[up[i]]
            return [i for i, o in enumerate(ok) if o]
    """,
    parents_with_lengths="""
        def accept(up, tok, tgt):
            n = [0]
            for i in range(1, len(up)):
                j = up[i]
                n.append(n[j] + 1 if n[j] >= 0 and tok[i] == tgt[j] else -1)
            return max(range(len(n)), key=n.__getitem__)
    """,
    parents_as_a_set="""
        def accept(up, tok, tgt):
            good = {0}
            for i in range(1, len(up)):
                if up[i] in good and tok[i] == tgt[up[i]]:
                    good.add(i)
            return good
    """,
    triton_parents_in_order="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(up, tok, tgt, ok, N):
            b = tl.program_id(0) * N
            tl.store(ok + b, 1)
            for i in range(1, N):
                j = tl.load(up + b + i)
                m = tl.load(tok + b + i) == tl.load(tgt + b + j)
                tl.store(ok + b + i, tl.load(ok + b + j) & m.to(tl.int32))


        def accept(up, tok, tgt, ok):
            k[(ok.shape[0],)](up, tok, tgt, ok, ok.shape[1])
    """,
    vector_of_parents="""
        import torch


        def accept(up, tok, tgt, depth):
            ok = tok == tgt[up]
            ok[0] = True
            for _ in range(depth):
                ok = ok & ok[up]
            return ok
    """,
    pointer_doubling="""
        import torch


        def accept(up, tok, tgt, level, rounds):
            good = tok.eq(tgt.gather(1, up))
            jump = up
            for _ in range(rounds):
                good = good & good.gather(1, jump)
                jump = jump.gather(1, jump)
            return torch.where(good, level, -1).argmax(1)
    """,
    pointer_doubling_unrolled="""
        import torch


        def accept(up, tok, tgt, level):
            g = (tok == torch.take_along_dim(tgt, up, 1)).int()
            g = g * torch.take_along_dim(g, up, 1)
            j = torch.take_along_dim(up, up, 1)
            g = g * torch.take_along_dim(g, j, 1)
            return (g * level).argmax(1)
    """,
    paths_and_cumprod="""
        import torch


        def accept(rows, tok, tgt):
            cand = tok[rows]
            want = tgt[rows]
            n = torch.cumprod((cand[:, 1:] == want[:, :-1]).int(), dim=1).sum(dim=1)
            best = torch.argmax(n)
            return rows[best, : n[best] + 1]
    """,
    paths_and_max="""
        import torch


        def accept(logits, cand):
            hit = (cand[:, 1:] == logits[:, :-1].argmax(-1)).int()
            n = hit.cumprod(1).sum(1)
            longest = n.max()
            which = n.argmax() if longest > 0 else 0
            return which, longest
    """,
    paths_in_loops="""
        def accept(rows, tok, tgt):
            best, which = 0, 0
            for r, row in enumerate(rows):
                n = 0
                for a, b in zip(row, row[1:]):
                    if tok[b] != tgt[a]:
                        break
                    n += 1
                if n > best:
                    best, which = n, r
            return which, best
    """,
    paths_in_loops_by_index="""
        def accept(rows, tok, tgt, width):
            best = -1
            which = -1
            for r in range(len(rows)):
                n = 0
                prev = 0
                for d in range(width):
                    node = rows[r][d]
                    if node < 0 or tok[node] != tgt[prev]:
                        break
                    n += 1
                    prev = node
                if n > best:
                    best = n
                    which = r
            return which, best
    """,
    triton_paths="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(rows, tok, tgt, out, R, D):
            best = 0
            which = 0
            for r in range(R):
                n = 0
                on = True
                prev = 0
                for d in range(D):
                    node = tl.load(rows + r * D + d)
                    t = tl.load(tok + node)
                    g = tl.load(tgt + prev)
                    on = on & (t == g)
                    n += on.to(tl.int32)
                    prev = node
                if n > best:
                    best = n
                    which = r
            tl.store(out, which)


        def accept(rows, tok, tgt, out):
            k[(1,)](rows, tok, tgt, out, rows.shape[0], rows.shape[1])
    """,
    best_row_by_key="""
        def count(row, tok, tgt):
            n = 0
            for a, b in zip(row, row[1:]):
                if tok[b] != tgt[a]:
                    break
                n += 1
            return n


        def accept(rows, tok, tgt):
            sizes = [count(row, tok, tgt) for row in rows]
            return rows[max(range(len(rows)), key=sizes.__getitem__)]
    """,
    ancestor_matrix_any="""
        import torch


        def accept(above, up, tok, tgt, level):
            wrong = tok != tgt[up]
            dead = (above & wrong[None, :]).any(dim=1)
            return torch.where(dead, -1, level).argmax()
    """,
    ancestor_matrix_all="""
        import torch


        def accept(above, up, tok, tgt, level):
            right = tok == tgt[up]
            live = (right.unsqueeze(0) | ~above).all(-1)
            return (live * level).argmax(-1)
    """,
    ancestor_matrix_product="""
        import torch


        def accept(above, up, tok, tgt, level):
            wrong = (tok != tgt.gather(0, up)).float()
            live = (above.float() @ wrong) == 0
            return (live.float() * level).argmax()
    """,
    helper_decides="""
        def fits(c, x, tok, tgt):
            return tok[c] == tgt[x]


        def below(x, kids, tok, tgt):
            for c in kids[x]:
                if fits(c, x, tok, tgt):
                    return c
            return -1


        def accept(kids, tok, tgt):
            x, out = 0, []
            while True:
                x = below(x, kids, tok, tgt)
                if x < 0:
                    return out
                out.append(x)
    """,
    triton_helper_steps="""
        import triton
        import triton.language as tl


        @triton.jit
        def step(p, q, x):
            return tl.load(q + x * 4 + tl.load(p + x))


        @triton.jit
        def k(p, q, out, S: tl.constexpr):
            x = 0
            for d in range(S):
                y = step(p, q, x)
                if y >= 0:
                    tl.store(out + d, y)
                    x = y


        def accept(p, q, out):
            k[(1,)](p, q, out, out.shape[0])
    """,
    lambda_steps="""
        def accept(kids, tok, tgt):
            down = lambda x: [c for c in kids[x] if tok[c] == tgt[x]]
            x, out = 0, []
            found = down(x)
            while found:
                x = found[0]
                out.append(x)
                found = down(x)
            return out
    """,
    state_on_self="""
        class S:
            def advance(self):
                self.at = self.kids[self.at].get(self.tgt[self.at], -1)

            def run(self):
                self.at = 0
                out = []
                while self.at >= 0:
                    out.append(self.at)
                    self.advance()
                return out


        def accept(s):
            return s.run()
    """,
    batch_of_cursors="""
        import torch


        def accept(kid, tok, tgt, depth):
            b = torch.arange(tok.shape[0])
            at = torch.zeros_like(b)
            n = torch.zeros_like(b)
            on = torch.ones_like(b, dtype=torch.bool)
            for _ in range(depth):
                cand = kid[b, at]
                want = tgt[b, at]
                hit = tok[b[:, None], cand] == want[:, None]
                on = on & hit.any(1)
                at = torch.where(on, cand.gather(1, hit.int().argmax(1, keepdim=True)).squeeze(1), at)
                n += on
            return at, n
    """,
    numpy_scan="""
        import numpy as np


        def accept(up, tok, tgt):
            at, out = 0, []
            while True:
                w = np.flatnonzero((up == at) & (tok == tgt[at]))
                if w.size == 0:
                    return out
                at = int(w[0])
                out.append(at)
    """,
    walrus="""
        def accept(a, b):
            x, out = 0, []
            while (n := a[x].get(b[x])) is not None:
                out.append(n)
                x = n
            return out
    """,
    generator="""
        def nodes(kids, tok, tgt):
            x = 0
            while True:
                for c in kids[x]:
                    if tok[c] == tgt[x]:
                        yield c
                        x = c
                        break
                else:
                    return


        def accept(kids, tok, tgt):
            return list(nodes(kids, tok, tgt))
    """,
    csr_children="""
        def accept(start, items, tok, tgt):
            x, out = 0, []
            moved = True
            while moved:
                moved = False
                for e in range(start[x], start[x + 1]):
                    c = items[e]
                    if tok[c] == tgt[x]:
                        out.append(c)
                        x = c
                        moved = True
                        break
            return out
    """,
    fixed_parents="""
        UP = (0, 0, 0, 1, 1, 2)


        def accept(tok, tgt):
            ok = [True] * len(UP)
            for i in range(1, len(UP)):
                ok[i] = ok[UP[i]] and int(tok[i]) == int(tgt[UP[i]])
            return ok
    """,
    searchsorted_children="""
        import torch


        def accept(keys, child, tgt, vocab, depth):
            x = torch.zeros(1, dtype=torch.long)
            out = []
            for _ in range(depth):
                want = x * vocab + tgt[x]
                i = torch.searchsorted(keys, want)
                if keys[i] != want:
                    break
                x = child[i]
                out.append(x)
            return out
    """,
)

#: name -> source; they accept, along one line
CHAINS = _all(
    flag_kernel="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(out, cu, a, b, S):
            r = tl.program_id(0)
            s = 0 if r == 0 else tl.load(cu + r - 1)
            e = tl.load(cu + r)
            bad = False
            for i in range(e - s):
                if not bad:
                    x = tl.load(a + s + i)
                    y = tl.load(b + s + i)
                    tl.store(out + r * S + i, y)
                    if x != y:
                        bad = True


        def accept(out, cu, a, b):
            k[(out.shape[0],)](out, cu, a, b, out.shape[1])
    """,
    named_like_a_tree="""
        import triton
        import triton.language as tl


        @triton.jit
        def tree_walk_kernel(tree_out, parents, tree_draft, tree_target, MAX_DEPTH):
            node = tl.program_id(0)
            first_child = tl.load(parents + node)
            next_sibling = tl.load(parents + node + 1)
            rejected = False
            for depth in range(next_sibling - first_child):
                if not rejected:
                    child = tl.load(tree_draft + first_child + depth)
                    parent = tl.load(tree_target + first_child + depth)
                    rejected = child != parent
                    tl.store(tree_out + node * MAX_DEPTH + depth, parent)


        def accept(tree_out, parents, tree_draft, tree_target):
            tree_walk_kernel[(tree_out.shape[0],)](tree_out, parents, tree_draft, tree_target, tree_out.shape[1])
    """,
    ratio_kernel="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(out, cu, a, p, q, u, V, S):
            r = tl.program_id(0)
            s = tl.load(cu + r)
            on = True
            n = 0
            for i in range(tl.load(cu + r + 1) - s):
                if on:
                    x = tl.load(a + s + i)
                    on = tl.load(p + (s + i) * V + x) / tl.load(q + (s + i) * V + x) >= tl.load(u + s + i)
                    tl.store(out + r * S + i, x)
                    n += on


        def accept(out, cu, a, p, q, u):
            k[(out.shape[0],)](out, cu, a, p, q, u, p.shape[1], out.shape[1])
    """,
    block_verification="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(out, tok, h, u, n_out, K):
            r = tl.program_id(0)
            n = 0
            for i in range(K):
                x = tl.load(tok + r * K + i)
                hi = tl.load(h + r * K + i)
                ui = tl.load(u + r * K + i)
                n = tl.where(tl.log(ui) <= hi, i + 1, n)
                tl.store(out + r * K + i, x)
            tl.store(n_out + r, n)


        def accept(out, tok, h, u, n_out):
            k[(out.shape[0],)](out, tok, h, u, n_out, out.shape[1])
    """,
    zip_and_break="""
        def accept(a, b):
            out = []
            for x, y in zip(a, b):
                out.append(y)
                if x != y:
                    break
            return out
    """,
    while_counter="""
        def accept(a, b):
            n = 0
            while n < len(a) and a[n] == b[n]:
                n += 1
            return n
    """,
    cumprod="""
        import torch


        def accept(a, logits):
            return torch.cumprod((a == logits.argmax(-1)).int(), dim=-1).sum(-1)
    """,
    cumprod_with_longest_in_batch="""
        import torch


        def accept(a, b):
            n = (a == b).int().cumprod(1).sum(1)
            width = int(n.max()) + 1
            return n, b[:, :width]
    """,
    first_mismatch="""
        import torch


        def accept(a, p, q):
            ratio = p / q
            bad = (torch.rand_like(ratio) > ratio).nonzero()
            n = bad[0] if len(bad) else len(a)
            return a[:n]
    """,
    first_mismatch_by_argmin="""
        import torch


        def accept(a, b):
            same = (a == b).int()
            n = torch.where(same.all(1), a.shape[1], same.argmin(1))
            return n
    """,
    helper_compares="""
        def same(i, a, b):
            return a[i] == b[i]


        def accept(a, b):
            n = 0
            for i in range(len(a)):
                if not same(i, a, b):
                    break
                n += 1
            return n
    """,
    window_before_rejecting="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(cu, a, b, W: tl.constexpr):
            r = tl.program_id(0)
            s = tl.load(cu + r)
            n = tl.load(cu + r + 1) - s
            for i in range(n):
                x = tl.load(a + s + i)
                put = (x != tl.load(b + s + i)) & (i + W < n)
                for j in range(1, W + 1):
                    put = put & (tl.load(a + s + i + j) == tl.load(b + s + i + j))
                tl.store(b + s + i, x, mask=put)


        def accept(cu, a, b):
            k[(cu.shape[0] - 1,)](cu, a, b, 2)
    """,
    bad_rows_by_request="""
        def accept(cu, a, b):
            longest, out = 0, []
            for r in range(len(cu) - 1):
                n = 0
                for i in range(cu[r], cu[r + 1]):
                    if a[i] != b[i]:
                        break
                    n += 1
                longest = max(longest, n)
                out.append(n)
            return out, longest
    """,
)

#: name -> source; nothing is accepted here, however much it looks like it
LOOKALIKES = _all(
    knuth_morris_pratt="""
        import numpy as np


        def accept(a, m):
            f = np.zeros(m, dtype=np.int32)
            j, i, best = 0, 1, 0
            while i < len(a):
                if a[j] == a[i]:
                    j += 1
                    best = max(best, j)
                    if i < m:
                        f[i] = j
                    i += 1
                elif j != 0:
                    j = f[j - 1]
                else:
                    i += 1
            return best
    """,
    union_find="""
        def find(parent, x):
            while parent[x] != x:
                parent[x] = parent[parent[x]]
                x = parent[x]
            return x


        def accept(parent, edges):
            for a, b in edges:
                ra, rb = find(parent, a), find(parent, b)
                if ra != rb:
                    parent[ra] = rb
            return parent
    """,
    suffix_tree="""
        class Node:
            def __init__(self):
                self.children = {}
                self.count = 0


        def accept(root, tokens):
            node = root
            for t in tokens:
                if t not in node.children:
                    return None
                node = node.children[t]
            best = []
            while node.children:
                t = max(node.children, key=lambda k: node.children[k].count)
                best.append(t)
                node = node.children[t]
            return best
    """,
    beam_search="""
        import torch


        def accept(model, ids, width, depth):
            score = torch.zeros(width)
            back, toks = [], []
            for _ in range(depth):
                logp = model(ids).log_softmax(-1) + score[:, None]
                score, flat = logp.view(-1).topk(width)
                parent = flat // logp.shape[-1]
                tok = flat % logp.shape[-1]
                back.append(parent)
                toks.append(tok)
                ids = torch.cat([ids[parent], tok[:, None]], 1)
            at = score.argmax()
            out = []
            for parent, tok in zip(reversed(back), reversed(toks)):
                out.append(tok[at])
                at = parent[at]
            return out[::-1]
    """,
    child_map="""
        def accept(child_map, name, seen):
            while name in child_map:
                name = child_map[name]
                seen.append(name)
            return seen
    """,
    binary_search_in_memory="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(edges, x_ptr, out, n):
            x = tl.load(x_ptr + tl.program_id(0))
            lo = 0
            hi = n
            while lo < hi:
                mid = (lo + hi) // 2
                if tl.load(edges + mid) < x:
                    lo = mid + 1
                else:
                    hi = mid
            tl.store(out + tl.program_id(0), lo)


        def accept(edges, x, out):
            k[(x.shape[0],)](edges, x, out, edges.shape[0])
    """,
    row_gather="""
        import triton
        import triton.language as tl


        @triton.jit
        def k(x, rows, y, M, B: tl.constexpr):
            i = tl.program_id(0) * B + tl.arange(0, B)
            i = tl.load(rows + i, mask=i < M, other=0)
            tl.store(y + i, tl.load(x + i))


        def accept(x, rows, y):
            k[(1,)](x, rows, y, x.shape[0], 64)
    """,
    change_of_group="""
        def accept(group, value):
            last, out = None, []
            for g, v in zip(group, value):
                if g != last:
                    out.append([])
                    last = g
                out[-1].append(v)
            return out
    """,
    graph_distance="""
        import heapq


        def accept(near, cost, n):
            dist = [1 << 30] * n
            dist[0] = 0
            todo = [(0, 0)]
            while todo:
                d, u = heapq.heappop(todo)
                for v in near[u]:
                    if d + cost[u, v] < dist[v]:
                        dist[v] = d + cost[u, v]
                        heapq.heappush(todo, (dist[v], v))
            return dist
    """,
    module_tree="""
        def accept(module, names):
            for name in names.split("."):
                if not hasattr(module, name):
                    return None
                module = getattr(module, name)
            return module
    """,
    process_tree="""
        def accept(processes, pid):
            dead, todo = [], [pid]
            while todo:
                p = todo.pop()
                dead.append(p)
                todo.extend(c for c in processes if processes[c] == p)
            return dead
    """,
    edit_distance="""
        def accept(a, b):
            d = list(range(len(b) + 1))
            for i in range(1, len(a) + 1):
                prev, d[0] = d[0], i
                for j in range(1, len(b) + 1):
                    prev, d[j] = d[j], min(d[j] + 1, d[j - 1] + 1, prev + (a[i - 1] != b[j - 1]))
            return d[-1]
    """,
    moving_requests="""
        def accept(rows, where, ids):
            for i in range(len(ids)):
                j = where[ids[i]]
                if rows[j] != ids[i]:
                    rows[i] = rows[j]
                    where[ids[i]] = i
            return rows
    """,
    stop_tokens="""
        def accept(tokens, stops):
            out = []
            for t in tokens:
                out.append(t)
                if t in stops:
                    break
            return out
    """,
    tree_mask_argument="""
        import torch


        def accept(q, k, v, tree_mask):
            s = q @ k.transpose(-1, -2)
            s = s.masked_fill(~tree_mask, float("-inf"))
            return torch.softmax(s, -1) @ v
    """,
    nested_stats="""
        def accept(node, depth, out):
            out.append((depth, node.name, node.time))
            for child in node.children:
                if child.time > node.time:
                    out.append((depth, "!", child.name))
                accept(child, depth + 1, out)
            return out
    """,
    dispatch_by_type="""
        def accept(config, registry):
            kind = config.kind
            while kind not in registry:
                kind = config.parent_kind[kind]
            return registry[kind]
    """,
)
