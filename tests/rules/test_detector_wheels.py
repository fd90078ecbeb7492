"""What the detector says of published vLLM wheels, and of copies of them that a walk was written into."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from reports.model import Verdict
from rules.engine import judge
from rules.examples_walks import CHAINS, LOOKALIKES, WALKS
from rules.testing import tree_from_dir
from rules.tree import EntryPoint, InstallTree, SourceFile

pytestmark = pytest.mark.wheel

Wheels = Callable[[str], Path]
RELEASES = ("0.20.2", "0.21.0", "0.22.0", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.28.0", "0.30.0", "0.33.0")
#: The accept kernels, read in the wheels by hand (docs/audit-anchors.md §2.1).
KERNELS = {
    "0.20.2": {
        "rejection_greedy_sample_kernel",
        "rejection_random_sample_kernel",
        "_strict_rejection_sample_kernel",
        "_probabilistic_rejection_kernel",
        "_synthetic_rejection_sample_kernel",
    },
    "0.23.0": {"rejection_greedy_sample_kernel", "rejection_random_sample_kernel", "_rejection_kernel"},
    "0.33.0": {
        "rejection_greedy_sample_kernel",
        "rejection_random_sample_kernel",
        "_rejection_kernel",
        "apply_fly_greedy_acceptance_kernel",
        "apply_fly_random_acceptance_kernel",
    },
}
SAMPLER = "vllm/v1/sample/rejection_sampler.py"
HOOKED = dedent("""
    from extra.walking import accept
    from vllm.v1.sample.rejection_sampler import RejectionSampler


    def register():
        def forward(self, metadata, draft_probs, logits, sampling_metadata):
            return accept(*metadata.tables, logits.argmax(-1))

        RejectionSampler.forward = forward
""")


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One facts cache for this file's scans."""
    return tmp_path_factory.mktemp("facts")


def answers(tree: InstallTree, facts: Path) -> dict[str, Verdict]:
    judgement = judge(tree, cache=facts)
    assert not judgement.errors
    return {verdict.id: verdict for verdict in judgement.verdicts}


def with_files(tree: InstallTree, files: dict[str, str], origin: str = "vllm") -> InstallTree:
    """The install with these files changed or added, as a scan would find them."""
    made = {hashlib.sha256(text.encode()).hexdigest(): text.encode() for text in files.values()}
    new = [
        SourceFile(path, hashlib.sha256(text.encode()).hexdigest(), len(text.encode()), origin, origin != "vllm")
        for path, text in files.items()
    ]
    kept = [f for f in tree.files if f.path not in files]
    read = tree.read
    return dataclasses.replace(tree, files=(*kept, *new), read=lambda sha: made[sha] if sha in made else read(sha))


def text_of(tree: InstallTree, path: str) -> str:
    return tree.read(next(f.sha256 for f in tree.files if f.path == path)).decode()


@pytest.mark.parametrize("version", RELEASES)
def test_no_release_walks_a_tree(version: str, wheel_tree: Wheels, facts: Path) -> None:
    said = answers(tree_from_dir(wheel_tree(version)), facts)
    assert said["tree-walk"].outcome == "no", said["tree-walk"].summary
    assert said["tree-commit"].outcome == "no"
    assert said["hybrid-tree-state"].outcome == "no"
    assert said["tree-build"].outcome == ("yes" if version == "0.20.2" else "no")
    assert said["tree-mask"].outcome == ("yes" if version == "0.20.2" else "partial")
    assert {item["shape"] for item in said["verifiers"].items} == {"chain"}
    assert said["verifiers"].outcome == said["opaque-code"].outcome == "yes"


@pytest.mark.parametrize("version", KERNELS)
def test_verifiers_are_the_accept_kernels(version: str, wheel_tree: Wheels, facts: Path) -> None:
    items = answers(tree_from_dir(wheel_tree(version)), facts)["verifiers"].items
    assert sorted(item["symbol"] for item in items) == sorted(KERNELS[version])
    assert all(item["reachable"] for item in items)


def test_the_tree_of_0_20_2_names_what_turns_it_on(wheel_tree: Wheels, facts: Path) -> None:
    said = answers(tree_from_dir(wheel_tree("0.20.2")), facts)
    assert "speculative_token_tree" in said["tree-build"].summary
    assert "TREE_ATTN" in said["tree-mask"].summary


@pytest.mark.parametrize("version", ["0.20.2", "0.33.0"])
@pytest.mark.parametrize("name", list(WALKS)[::4])
def test_walk_in_the_runners_sampler(version: str, name: str, wheel_tree: Wheels, facts: Path) -> None:
    tree = tree_from_dir(wheel_tree(version))
    sampler = text_of(tree, SAMPLER)
    call = "        return walked(*metadata.tables, logits)\n"
    start = sampler.index(":\n", sampler.index("-> SamplerOutput", sampler.index("def forward("))) + 2
    changed = "from vllm.v1.sample.other import accept as walked\n" + sampler[:start] + call + sampler[start:]
    changed = _future_first(changed)
    said = answers(with_files(tree, {SAMPLER: changed, "vllm/v1/sample/other.py": WALKS[name]}), facts)
    assert said["tree-walk"].outcome == "yes", said["tree-walk"].summary
    assert said["tree-walk"].evidence[0].file == "vllm/v1/sample/other.py"


@pytest.mark.parametrize("name", list(CHAINS)[::3] + list(LOOKALIKES)[::3])
def test_what_is_no_walk_in_the_runners_sampler(name: str, wheel_tree: Wheels, facts: Path) -> None:
    tree = tree_from_dir(wheel_tree("0.33.0"))
    sampler = text_of(tree, SAMPLER)
    start = sampler.index(":\n", sampler.index("-> SamplerOutput", sampler.index("def forward("))) + 2
    changed = sampler[:start] + "        return other(*metadata.tables, logits)\n" + sampler[start:]
    changed = _future_first("from vllm.v1.sample.other import accept as other\n" + changed)
    source = {**CHAINS, **LOOKALIKES}[name]
    said = answers(with_files(tree, {SAMPLER: changed, "vllm/v1/sample/other.py": source}), facts)
    assert said["tree-walk"].outcome == "no", said["tree-walk"].summary


def _future_first(text: str) -> str:
    return (
        text
        if "from __future__" not in text
        else "from __future__ import annotations\n" + text.replace("from __future__ import annotations\n", "", 1)
    )


def test_walk_that_nothing_leads_to(wheel_tree: Wheels, facts: Path) -> None:
    tree = with_files(tree_from_dir(wheel_tree("0.33.0")), {"vllm/v1/sample/other.py": WALKS["objects"]})
    said = answers(tree, facts)
    assert said["tree-walk"].outcome == "partial"
    assert "no sampler" in said["tree-walk"].summary


def test_walk_that_a_plugin_puts_in_place(wheel_tree: Wheels, facts: Path) -> None:
    files = {"extra/__init__.py": "", "extra/walking.py": WALKS["triton-compares-parents"], "extra/hook.py": HOOKED}
    tree = with_files(tree_from_dir(wheel_tree("0.33.0")), files, "plugin:extra")
    entry = EntryPoint("vllm.general_plugins", "extra", "extra.hook:register", "extra", "1.0")
    said = answers(dataclasses.replace(tree, entry_points=(*tree.entry_points, entry)), facts)
    assert said["tree-walk"].outcome == "yes", said["tree-walk"].summary
    assert said["verifiers"].items[0]["origin"] == "plugin:extra"


def test_walk_on_pythonpath(wheel_tree: Wheels, facts: Path) -> None:
    files = {"extra/__init__.py": "", "extra/walking.py": WALKS["worklist"], "extra/hook.py": HOOKED}
    files["sitecustomize.py"] = "from extra.hook import register\n\nregister()\n"
    tree = with_files(tree_from_dir(wheel_tree("0.33.0")), files, "pythonpath:0")
    assert answers(tree, facts)["tree-walk"].outcome == "yes"


def test_pythonpath_shadows_the_sampler(wheel_tree: Wheels, facts: Path) -> None:
    walk = (
        WALKS["parents-in-order"]
        + "\n\nclass RejectionSampler:\n    def __call__(self, m, *a):\n        return accept(*m.t)\n"
    )
    tree = tree_from_dir(wheel_tree("0.33.0"))
    sha = hashlib.sha256(walk.encode()).hexdigest()
    shadow = SourceFile(SAMPLER, sha, len(walk), "pythonpath:0")
    read = tree.read
    tree = dataclasses.replace(tree, files=(*tree.files, shadow), read=lambda s: walk.encode() if s == sha else read(s))
    assert answers(tree, facts)["tree-walk"].outcome == "yes"


def test_hook_of_a_model_gives_the_sampler(wheel_tree: Wheels, facts: Path) -> None:
    source = WALKS["dict-of-children"] + dedent("""

        class Mine:
            def __call__(self, metadata, logits):
                return accept(*metadata.tables, logits)


        class State:
            def custom_sampler(self, sampler):
                return sampler, Mine()
    """)
    tree = with_files(tree_from_dir(wheel_tree("0.33.0")), {"vllm/v1/worker/gpu/model_states/mine.py": source})
    assert answers(tree, facts)["tree-walk"].outcome == "yes"


def test_unreadable_sampler_makes_it_unknown(wheel_tree: Wheels, facts: Path) -> None:
    tree = tree_from_dir(wheel_tree("0.33.0"))
    tree = with_files(tree, {SAMPLER: "def broken(:\n"})
    judgement = judge(tree, cache=facts)
    said = {v.id: v for v in judgement.verdicts}
    assert said["tree-walk"].outcome == said["verifiers"].outcome == "unknown"
    assert any(e["code"] == "file-failed" for e in judgement.errors)
