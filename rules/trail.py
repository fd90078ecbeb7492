"""The search as a person would make it: one grep per scope, what it prints, what that alone proves, and what the next
step adds.

The reader has made this search, or is about to. Each step is the real command with its real number of lines, so that it
can be typed again; the verdicts say what the hits are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from reports.model import Evidence, TrailStep
from rules.base import Context
from rules.grep import KNOWN, TREE, Hits, command, grep, sources, whole_install

#: The file of each model runner.
RUNNERS = {"V1": "vllm/v1/worker/gpu_model_runner.py", "V2": "vllm/v1/worker/gpu/model_runner.py"}
_KIN = ("parent", "sibling", "ancestor")
_SPEC = ("vllm/v1/spec_decode", "vllm/v1/worker/gpu/spec_decode")
_EAGLE = ("vllm/v1/spec_decode/eagle.py", "vllm/v1/worker/gpu/spec_decode/eagle")
_ACCEPT = ("accepted", "rejected")
# An operator's schema (it stands in the binary as text) with an argument that could hold a tree's links.
_HAS_LINKS = re.compile(
    r"^[A-Za-z_0-9:.]+ *\(.*(tree|parent|child|sibling|retrive|retrieve_next|accept_index).*\) *-> "
)


def trail(ctx: Context) -> tuple[TrailStep, ...]:
    """The steps for this install, from the runner's file out to the binaries. Steps whose scope does not exist here are
    left out."""
    steps = (_runner, _engine, _spec_decode, _eagle, _acceptance, _install, _known, _plugins, _binaries)
    return tuple(step for make in steps for step in make(ctx))


def runners_in_force(ctx: Context) -> tuple[str, ...]:
    """The runners ("V1", "V2") that the verdict ``runner-in-force`` names; empty when it could not tell."""
    verdict = ctx.verdicts.get("runner-in-force")
    named = {str(item.get("runner", "")) for item in verdict.items} if verdict else set()
    return tuple(runner for runner in RUNNERS if runner in named)


def _runner(ctx: Context) -> Iterator[TrailStep]:
    force = runners_in_force(ctx)
    paths = [path for runner, path in RUNNERS.items() if ctx.file(path) and (runner in force or not force)]
    if not paths:
        return
    words = (*TREE, *_KIN)
    hits = _in(ctx, words, lambda path: path in paths)
    mine = [item for item in _accept_functions(ctx) if not force or any(r in str(item.get("runner")) for r in force)]
    built = f"`{mine[0]['file']}:{mine[0]['line']}`" if mine else ""
    roots = [root.split(" ")[0] for root in _roots(ctx) if root.startswith(tuple(paths))]
    where = f" ({', '.join(roots[:2])})" if roots else ""
    silence = "Nothing. " if not hits.lines else "Nothing: these are other things by the same name. "
    accepts = [item for item in _accept_functions(ctx) if item.get("file") in paths]
    proves = (
        f"{silence}Of the accept functions, {len(accepts)} stand in this file; the others are elsewhere."
        if accepts
        else f"{silence}The runner accepts no token itself: it constructs a sampler{where}, and the decision is made "
        "there, "
        "under whatever names."
    )
    who = f"the runner in force ({', '.join(force)})" if force else "either model runner"
    yield _step(
        f"the model runner's file ({', '.join(force)})" if force else "the model runners' files",
        f"Does {who} speak of trees?",
        command(words, paths),
        hits,
        proves,
        "everything that the runner can call in `vllm/v1`"
        + (f", among it the accept function at {built}." if built else "."),
    )


def _engine(ctx: Context) -> Iterator[TrailStep]:
    hits = whole_install(ctx.tree).tree.under("vllm/v1")
    mask = ctx.verdicts.get("tree-mask")
    if mask and mask.outcome in ("yes", "partial") and mask.evidence:
        word = "is there" if mask.outcome == "yes" else "is there in part"
        seen = "" if mask.evidence[0].file in hits.files else "nothing about what is here: under another name, "
        proves = (
            f"{seen}tree attention {word} ({_at(mask.evidence[0])}). "
            "A mask decides what a node may see, not which token is accepted."
        )
    elif hits.lines:
        proves = "that the word is in use. Files that say “out-of-tree” or “suffix tree” say nothing about acceptance."
    else:
        proves = "Nothing: a walk needs none of these words."
    yield _step(
        "`vllm/v1`", "Does anything in the engine?", command(TREE, ["vllm/v1"]), hits, proves, "who drafts, and what."
    )


def _spec_decode(ctx: Context) -> Iterator[TrailStep]:
    there = [folder for folder in _SPEC if _exists(ctx, folder)]
    if not there:
        return
    hits = whole_install(ctx.tree).tree.under(*there)
    build = ctx.verdicts.get("tree-build")
    if build and build.outcome in ("yes", "partial") and build.evidence:
        proves = (
            f"a drafter does propose a tree ({_at(build.evidence[0])}). "
            "Building branches is one thing; whether anything judges more than one of them is another."
        )
    elif hits.lines and all(
        "suffix" in path or "FIXME" in text or text.lstrip().startswith("#") for path, _, text in hits.found
    ):
        proves = (
            "that suffix decoding drafts from a suffix tree (its draft is one chain), and that comments outlive code."
        )
    elif hits.lines:
        proves = "that the word is in use where drafts are made. Who accepts them is not said here."
    else:
        proves = "that nothing here is called a tree."
    yield _step(
        "`spec_decode/`",
        "Do the drafters?",
        command(TREE, there),
        hits,
        proves,
        "the method that drafted trees first, EAGLE.",
    )


def _eagle(ctx: Context) -> Iterator[TrailStep]:
    there = [place for place in _EAGLE if _exists(ctx, place)]
    if not there:
        return
    words = (*TREE, *_KIN)
    hits = _in(ctx, words, lambda path: any(path == p or path.startswith(p + "/") for p in there))
    build = ctx.verdicts.get("tree-build")
    if hits.having(*TREE).lines:
        proves = "that EAGLE's own files speak of trees."
    elif build and build.outcome == "yes" and build.evidence:
        proves = (
            f"that EAGLE's tree is not in EAGLE's files: it is built at {_at(build.evidence[0])}. Folder names do not "
            "bound a search."
        )
    else:
        proves = "that EAGLE drafts no tree in its own files" + (
            "; `parent` is a module here, not a node." if hits.lines else "."
        )
    yield _step(
        "`eagle/`",
        "Does EAGLE, at least?",
        command(words, there),
        hits,
        proves,
        "the other end: where tokens are accepted, whatever the draft is called.",
    )


def _acceptance(ctx: Context) -> Iterator[TrailStep]:
    hits = _in(ctx, _ACCEPT, lambda path: path.startswith("vllm/v1/"))
    found = _accept_functions(ctx)
    inside = {str(item.get("file")) for item in found}
    proves = (
        f"that many files count accepted tokens. {len(found)} functions decide; they stand in {len(inside)} of these "
        f"{len(set(hits.files) | inside)} files, and the words are the same in those that only count."
        if found
        else "that many files count accepted tokens. Which of them decide is not in the words."
    )
    yield _step(
        "`vllm/v1`, acceptance",
        "Then where is a token accepted?",
        command(_ACCEPT, ["vllm/v1"]),
        hits,
        proves,
        "the rest of the install: models, kernels and vendored packages may hold a sampler of their own.",
    )


def _install(ctx: Context) -> Iterator[TrailStep]:
    hits = whole_install(ctx.tree).tree
    heavy = [path for path in _heaviest(hits) if not path.startswith("vllm/v1/")][:3]
    proves = (
        f"that the word has many trades: outside `vllm/v1`, above all in {', '.join(f'`{path}`' for path in heavy)}. "
        if heavy
        else "that the word is hardly used. "
    ) + "Reading every hit would still miss a walk that uses none of the words."
    yield _step(
        "the whole install",
        "Does anything at all?",
        command(TREE, ["vllm"]),
        hits,
        proves,
        "the names that other engines' verifiers have.",
    )


def _known(ctx: Context) -> Iterator[TrailStep]:
    hits = whole_install(ctx.tree).known
    proves = (
        "that a name known from another engine's verifier is here; the verdicts say what it does."
        if hits.lines
        else "that no known verifier was vendored under its own name. A fork's would have another."
    )
    yield _step(
        "the whole install, known names",
        "Does it use the names of SGLang's or EAGLE's verifier?",
        command(KNOWN, ["vllm"]),
        hits,
        proves,
        "code that vLLM loads from other packages.",
    )


def _plugins(ctx: Context) -> Iterator[TrailStep]:
    groups = sorted({(e.distribution, e.version, e.group) for e in ctx.tree.entry_points})
    shown = tuple(
        f"./{name.replace('-', '_')}-{version}.dist-info/entry_points.txt:[{group}]" for name, version, group in groups
    )
    others = sorted({e.distribution for e in ctx.tree.entry_points} - {"vllm"})
    proves = (
        f"that {', '.join(others)} can replace anything when vLLM starts. What it replaces is in its code, not in its "
        "name."
        if others
        else "that no other package declares a vLLM entry point (vLLM's own ones load LoRA adapters). Folders on "
        "PYTHONPATH would not show."
    )
    yield TrailStep(
        "plugins",
        "Does another package put code into vLLM?",
        "grep -rE --include=entry_points.txt '^\\[vllm\\.' .",
        len(shown),
        len({line.split(":")[0] for line in shown}),
        shown[:4],
        proves,
        "compiled code, which no grep over `.py` sees.",
    )


def _binaries(ctx: Context) -> Iterator[TrailStep]:
    read = [b for b in ctx.tree.binaries if b.schemas is not None]
    schemas = {schema for b in read for schema in b.schemas or ()}
    found = sorted(schema for schema in schemas if _HAS_LINKS.match(schema))
    inside = [b for b in read if not set(found).isdisjoint(b.schemas or ())]
    unread = len(ctx.tree.binaries) - len(read)
    if not ctx.tree.binaries:
        proves = "Nothing: this target has no compiled files."
    elif found:
        proves = "that an operator takes a table of links. The verdicts say whether acceptance calls it."
    else:
        proves = (
            f"that none of the {len(schemas)} operators of {_libraries(len(read))} declares an argument that could "
            "hold a tree's links."
        )
    if unread:
        proves += f" {_libraries(unread)} could not be read."
    yield TrailStep(
        "binaries",
        "Does a compiled operator take a tree?",
        'find vllm -name \'*.so\' -exec sh -c \'tr "\\n" " " < "$1" | strings -n 12\' _ {} \\; | '
        f"grep -E '{_HAS_LINKS.pattern}' | tr -s ' ' | sort -u",
        len(found),
        len(inside),
        tuple(schema[:300] for schema in found[:4]),
        proves,
        _conclusion(ctx),
    )


def _libraries(number: int) -> str:
    return "1 library" if number == 1 else f"{number} libraries"


def _conclusion(ctx: Context) -> str:
    walk = ctx.verdicts.get("tree-walk")
    if walk is None:
        return ""
    s = walk.scope
    return (
        f"what no grep can: all {s.functions_examined:,} functions of {s.files_parsed:,} files read by their shape, "
        f"with no names: {walk.summary}"
    )


def _step(scope: str, question: str, text: str, hits: Hits, proves: str, adds: str) -> TrailStep:
    return TrailStep(scope, question, text, hits.lines, len(hits.files), hits.sample, proves, adds)


def _in(ctx: Context, words: tuple[str, ...], wanted: Callable[[str], bool]) -> Hits:
    return grep(sources(ctx.tree, wanted), words)


def _exists(ctx: Context, place: str) -> bool:
    return any(f.path == place or f.path.startswith(place + "/") for f in ctx.tree.files if f.origin == "vllm")


def _heaviest(hits: Hits) -> list[str]:
    counts: dict[str, int] = {}
    for path, _, _ in hits.found:
        counts[path] = counts.get(path, 0) + 1
    return sorted(counts, key=lambda path: (-counts[path], path))


def _accept_functions(ctx: Context) -> list[dict[str, object]]:
    verdict = ctx.verdicts.get("verifiers")
    return [item for item in verdict.items if item.get("reachable") and item.get("file")] if verdict else []


def _roots(ctx: Context) -> tuple[str, ...]:
    return ctx.verdicts["verifiers"].scope.roots if "verifiers" in ctx.verdicts else ()


def _at(evidence: Evidence) -> str:
    return f"`{evidence.file}:{evidence.line}`"
