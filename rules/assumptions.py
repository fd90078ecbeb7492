"""What people take for granted about tree verification, each put to the test on this install."""

from __future__ import annotations

import re
from typing import Any, Literal

from reports.model import Assumption, Evidence
from rules.base import Context
from rules.grep import TREE, whole_install
from rules.trail import RUNNERS, runners_in_force

Holds = Literal["yes", "no", "unknown"]
_DEFINES = re.compile(r"\s*(?:async )?(?:def|class) +(\w*tree\w*)", re.I)


def assumptions(ctx: Context) -> tuple[Assumption, ...]:
    """The five, in the order in which a search usually runs into them. An assumption whose verdicts are missing is
    ``unknown``."""
    return (_exists(ctx), _in_runner(ctx), _mask_implies_walk(ctx), _named_so(ctx), _right_folder(ctx))


def _exists(ctx: Context) -> Assumption:
    walk, commit = ctx.verdicts.get("tree-walk"), ctx.verdicts.get("tree-commit")
    scope = (
        f"{walk.scope.functions_examined:,} functions of {walk.scope.files_parsed:,} files" if walk else "no function"
    )
    holds: Holds = "unknown"
    result = "The scan did not get to the verifiers."
    if walk is not None:
        holds = {"yes": "yes", "no": "no", "partial": "no"}.get(walk.outcome, "unknown")  # type: ignore[assignment]
        result = _sentence(walk.summary)
        if walk.outcome == "yes" and commit is not None and commit.outcome != "yes":
            holds = "no" if commit.outcome in ("no", "partial") else "unknown"
            kept = {"no": "is not kept", "partial": "is kept only in part"}.get(
                commit.outcome, "may or may not be kept"
            )
            result += f" That is half of it: the accepted path {kept} by index (tree-commit: {commit.outcome})."
    return Assumption(
        "Tree verification exists in this install, it only has to be found",
        f"every one of {scope} judged by its shape: does an acceptance that the sampler reaches follow links between "
        "drafted tokens?",
        result,
        holds,
        walk.evidence[:2] if walk else (),
    )


def _in_runner(ctx: Context) -> Assumption:
    found = _accept_functions(ctx)
    files = sorted({str(item.get("file")) for item in found})
    inside = [item for item in found if item.get("file") in RUNNERS.values()]
    holds: Holds = "unknown" if not found else "yes" if len(inside) == len(found) else "no"
    result = "No accept function was found, so there is nothing to place."
    if found:
        result = f"{len(inside)} of {len(found)} are; they stand in {_files(files)}."
    return Assumption(
        "Acceptance happens in the model runner",
        "which of the accept functions that the samplers reach stand in a runner's own file",
        result,
        holds,
    )


def _mask_implies_walk(ctx: Context) -> Assumption:
    mask, walk = ctx.verdicts.get("tree-mask"), ctx.verdicts.get("tree-walk")
    test = "the verdicts `tree-mask` and `tree-walk` side by side, each from code of its own"
    claim = "Tree attention implies tree verification"
    if mask is None or walk is None or "unknown" in (mask.outcome, walk.outcome):
        return Assumption(claim, test, "One of the two could not be judged.", "unknown")
    both = f"tree-mask: {mask.outcome}, tree-walk: {walk.outcome}."
    if mask.outcome in ("yes", "partial") and walk.outcome == "no":
        kind = "tree attention" if mask.outcome == "yes" else "a piece of tree attention"
        return Assumption(
            claim,
            test,
            f"{both} This install is the counterexample: it has {kind} and no walk.",
            "no",
            mask.evidence[:1],
        )
    if mask.outcome == "no":
        return Assumption(
            claim, test, f"{both} There is no tree attention here to draw the conclusion from.", "unknown"
        )
    return Assumption(
        claim,
        test,
        f"{both} Both are here, which is no proof that one implies the other.",
        "unknown",
        mask.evidence[:1],
    )


def _named_so(ctx: Context) -> Assumption:
    named = [
        (path, line, match.group(1))
        for path, line, text in whole_install(ctx.tree).tree.found
        if (match := _DEFINES.match(text))
    ]
    found = _accept_functions(ctx)
    walkers = [item for item in found if item.get("shape") not in ("chain", "opaque")]
    calls_itself = [item for item in walkers if _speaks(item)]
    test = "functions and classes with “tree” in their name against the functions that accept tokens by their shape"
    names = len(named)
    carry = sum(1 for item in found if _speaks(item))
    holds: Holds = "no"
    if not found:
        result, holds = (
            f"{names} definitions carry the word; no accept function was found to compare them with.",
            "unknown",
        )
    elif walkers:
        holds = "yes" if len(calls_itself) == len(walkers) else "no"
        result = (
            f"{len(calls_itself)} of {len(walkers)} functions that follow a tree say so in their name; {names} "
            "definitions carry the word."
        )
    else:
        result = (
            f"{names} definitions carry the word and none of them accepts a token; {carry} of the {len(found)} accept "
            "functions carry it."
        )
    where = tuple(e for path, line, name in named[:2] if (e := _definition(ctx, path, line, name)))
    return Assumption(
        "It would be named conventionally, so a grep for “tree” would find it", test, result, holds, where
    )


def _right_folder(ctx: Context) -> Assumption:
    force = runners_in_force(ctx)
    found = _accept_functions(ctx)
    by_runner = {
        runner: sorted({str(i.get("file")) for i in found if runner in str(i.get("runner", ""))}) for runner in RUNNERS
    }
    claim = "The folder one reads belongs to the runner in force"
    test = (
        "the runner that this install chooses for a dense and for a hybrid target, against the runner that each "
        "accept function serves"
    )
    chosen = ctx.verdicts.get("runner-in-force")
    if chosen is None or chosen.outcome != "yes" or not force:
        return Assumption(claim, test, "Which runner is in force could not be told.", "unknown")
    if not found:
        return Assumption(claim, test, f"{_sentence(chosen.summary)} No accept function was found to place.", "unknown")
    idle = [runner for runner, files in by_runner.items() if files and runner not in force]
    says = _sentence(chosen.summary)
    if idle:
        other = idle[0]
        result = (
            f"{says} The accept functions of {_files(by_runner[other])} serve {other}, which is not in force by "
            "default."
        )
        return Assumption(claim, test, result, "no")
    if len(force) > 1:
        return Assumption(claim, test, f"{says} Which folder counts depends on the target.", "no", chosen.evidence[:1])
    return Assumption(claim, test, f"{says} No accept function serves another runner.", "yes", chosen.evidence[:1])


def _definition(ctx: Context, path: str, line: int, name: str) -> Evidence | None:
    file = ctx.file(path)
    return ctx.evidence(file, line, line, name) if file else None


def _speaks(item: dict[str, Any]) -> bool:
    return any(word in str(item.get("symbol", "")).lower() for word in TREE)


def _accept_functions(ctx: Context) -> list[dict[str, Any]]:
    verdict = ctx.verdicts.get("verifiers")
    return [item for item in verdict.items if item.get("reachable") and item.get("file")] if verdict else []


def _files(files: list[str]) -> str:
    shown = ", ".join(f"`{file}`" for file in files[:3])
    return shown + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _sentence(text: str) -> str:
    text = text.strip()
    if re.match(r"[a-z]+[ ,:]", text):  # a name or a path keeps its letters
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
