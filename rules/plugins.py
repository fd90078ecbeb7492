"""Code that becomes part of vLLM without being in its folder: distributions with an entry point of a ``vllm.*`` group
(general plugins run in every process, and may replace any class), platform plugins, logits processors; ``.pth`` files
and ``sitecustomize`` that import; editable installs; folders on PYTHONPATH that shadow a module of vLLM. Their Python
is scanned with the same rules as vLLM's own.

The answer is the list in ``items``; ``yes`` means that the list is complete. vLLM's own entry points are listed too,
marked as its own.
"""

from __future__ import annotations

from typing import Any

from reports.model import Verdict
from rules.base import Context, Example
from rules.recheck import Recheck

ID = "plugins"
QUESTION = "What code outside the vLLM package runs inside it?"
CHANGES_IF = (
    "a distribution with a vllm.* entry point, a .pth file, or a PYTHONPATH folder comes or goes; VLLM_PLUGINS changes"
)
_SCRIPT = """import configparser, glob
for path in sorted(glob.glob("*.dist-info/entry_points.txt")):
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str
    parser.read(path)
    for group in sorted(s for s in parser.sections() if s.startswith("vllm.")):
        for name, value in sorted(parser.items(group)):
            print(path.split("-")[0], group, name, value)
"""


def judge(ctx: Context) -> Verdict:
    tree = ctx.tree
    count: dict[str, int] = {}
    first: dict[str, Any] = {}
    for file in tree.files:
        if file.origin != "vllm":
            count[file.origin] = count.get(file.origin, 0) + 1
            first.setdefault(file.origin, file)
    items: list[dict[str, Any]] = []
    evidence = []
    for entry in tree.entry_points:
        own = entry.distribution == "vllm"
        origin = "vllm" if own else f"plugin:{entry.distribution}"
        path = entry.value.split(":", 1)[0].replace(".", "/")
        module = ctx.file(f"{path}.py") or ctx.file(f"{path}/__init__.py")
        items.append(
            {
                "kind": "entry point",
                "distribution": entry.distribution,
                "version": entry.version,
                "group": entry.group,
                "name": entry.name,
                "value": entry.value,
                "own": own,
                "files": count.get(origin, 0) if not own else None,
                "file": module.path if module is not None else None,
            }
        )
        if module is not None and not own:
            evidence.append(ctx.evidence(module, 1, 10, entry.value))
    named = {f"plugin:{item['distribution']}" for item in items}
    for origin, files in sorted(count.items()):
        if origin.startswith("pythonpath:"):
            shadows = sum(f.origin == origin and f.path.startswith("vllm/") for f in tree.files)
            items.append({"kind": "pythonpath", "origin": origin, "files": files, "replaces_vllm_files": shadows})
        elif origin not in named:
            items.append({"kind": "files", "origin": origin, "files": files})
    items += [{"kind": "injected", "text": text} for text in tree.injected]
    if "VLLM_PLUGINS" in tree.environment:
        items.append({"kind": "environment", "text": f"VLLM_PLUGINS={tree.environment['VLLM_PLUGINS']}"})
    unseen = [i for i in items if i["kind"] == "entry point" and not i["own"] and not i["files"]]
    foreign = [i for i in items if not i.get("own")]
    said = [
        f"{i['distribution']} {i['version']} ({i['group']}: {i['name']})" for i in foreign if i["kind"] == "entry point"
    ]
    said += [i["text"] for i in foreign if i["kind"] in ("injected", "environment")]
    said += [f"{i['files']} files of {i['origin']}" for i in foreign if i["kind"] in ("pythonpath", "files")]
    ours = len(items) - len(foreign)
    summary = "; ".join(said) if said else "none"
    summary += f" (and {ours} entry points of vLLM itself)" if ours else ""
    if unseen:
        lost = ", ".join(i["distribution"] for i in unseen)
        summary = f"the code of {lost} was not found, so what it does is not known; listed: {summary}"
    # The metadata of distributions that are not vLLM's lies outside this tree on some targets: then only the names
    # are known here.
    printed = "".join(
        f"{i['distribution'].replace('-', '_')} {i['group']} {i['name']} {i['value']}\n"
        for i in sorted(
            (i for i in items if i["kind"] == "entry point"), key=lambda i: (i["distribution"], i["group"], i["name"])
        )
    )
    check = Recheck(ctx).python(_SCRIPT, prints=printed if items and not unseen else "" if not items else None)
    return Verdict(
        ID,
        "unknown" if unseen else "yes",
        summary,
        evidence=tuple(evidence),
        scope=ctx.scope(),
        changes_if=CHANGES_IF,
        question=QUESTION,
        items=tuple(items),
        **check.done(),
    )


_GENERAL = ("vllm.general_plugins", "walker", "walker.entry:register")
VALID = (
    Example("none", {"vllm/__init__.py": ""}, "yes", items=0),
    Example(
        "one plugin, its code there",
        {"vllm/__init__.py": "", "walker/entry.py": "def register(): ...\n"},
        "yes",
        entry_points=(_GENERAL,),
        items=1,
    ),
    Example("a PYTHONPATH folder over vLLM", {"vllm/__init__.py": "", "patches/__init__.py": ""}, "yes", items=1),
)
INVALID = (
    Example(
        "declared, but the code is not there", {"vllm/__init__.py": ""}, "unknown", entry_points=(_GENERAL,), items=1
    ),
    Example(
        "two declared, no code",
        {"vllm/__init__.py": ""},
        "unknown",
        entry_points=(_GENERAL, ("vllm.platform_plugins", "chip", "chip:platform")),
        items=2,
    ),
    Example(
        "a logits processor without code",
        {"vllm/a.py": ""},
        "unknown",
        entry_points=(("vllm.logits_processors", "p", "p.q:R"),),
        items=1,
    ),
)
