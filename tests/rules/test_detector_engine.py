"""Caches, packs, workers, broken files and broken rules: what a scan survives, and what it costs."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rules.base import Example
from rules.cache import Cache
from rules.engine import Progress, judge
from rules.examples import install
from rules.examples_walks import WALKS
from rules.extraction import PACK, extract_one, graph_unit, read_pack, units_of
from rules.facts.module import parse
from rules.facts.newer import rewritten
from rules.loading import load_rules, rules_sha256
from rules.testing import tree_from_example

STOCK = Example("stock", install(), "no")


def _walk(judgement: object) -> str:
    return next(v.outcome for v in judgement.verdicts if v.id == "tree-walk")  # type: ignore[attr-defined]


def test_judgement_is_kept_and_given_back(tmp_path: Path) -> None:
    first = judge(tree_from_example(STOCK), cache=tmp_path)
    again = judge(tree_from_example(STOCK), cache=tmp_path)
    assert (first.facts, again.facts, again.files_parsed_now) == ("parsed", "known", 0)
    assert again.verdicts == first.verdicts
    assert again.rules_sha256 == rules_sha256()


def test_a_changed_file_is_judged_anew(tmp_path: Path) -> None:
    judge(tree_from_example(STOCK), cache=tmp_path)
    changed = judge(tree_from_example(Example("walk", install(WALKS["objects"]), "yes")), cache=tmp_path)
    assert changed.files_parsed_now == 1
    assert _walk(changed) == "yes"


def _scan(folder: str, name: str) -> str:
    return _walk(judge(tree_from_example(Example(name, install(WALKS[name]), "yes")), cache=Path(folder)))


def test_scans_share_a_cache_at_the_same_time(tmp_path: Path) -> None:
    names = list(WALKS)[:6]
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.starmap(_scan, [(str(tmp_path), n) for n in names for _ in range(2)]) == ["yes"] * 12


def test_a_cache_that_cannot_be_used_is_an_error_entry_and_no_more(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    judgement = judge(tree_from_example(STOCK), cache=blocked)
    assert _walk(judgement) == "no"
    assert [e["code"] for e in judgement.errors] == ["cache"]


def test_a_damaged_cache_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "facts.sqlite").write_bytes(b"\0" * 5000)
    judgement = judge(tree_from_example(STOCK), cache=tmp_path)
    assert _walk(judgement) == "no"
    assert judgement.errors


def test_a_full_disk_costs_the_cache_only(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    assert store._db is not None
    store._db.execute("PRAGMA max_page_count = 4")
    store.put({f"{n:064x}": {"shapes": ["x" * 16, [{"k": "size", "n": n, "pad": "y" * 500}]]} for n in range(200)})
    assert "full" in store.problem
    assert store.rows(["0" * 64]) == {}


def test_a_rule_that_fails_costs_its_own_verdict_only(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        '"""Fails."""\nID = "mine"\nQUESTION = "?"\nCHANGES_IF = ""\nVALID = INVALID = ()\n\n\n'
        'def judge(ctx):\n    raise KeyError("x")\n'
    )
    judgement = judge(tree_from_example(STOCK), extra_rules=[tmp_path])
    assert _walk(judgement) == "no"
    assert next(v.outcome for v in judgement.verdicts if v.id == "mine") == "unknown"
    assert [e["code"] for e in judgement.errors] == ["rule-failed"]


def test_a_rule_file_without_its_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text('"""Half."""\nID = "half"\n')
    with pytest.raises(ValueError, match="QUESTION"):
        load_rules([tmp_path])


def test_files_of_a_newer_python_are_read() -> None:
    source = b"type X = list[int]\n\n\ndef f[T](a: T, b: T) -> str:\n    return f'{a['k']}\\n'\n"
    older = rewritten(source)
    assert older is not None
    assert len(older.splitlines()) == len(source.splitlines())
    assert [n.name for n in parse(source).body if hasattr(n, "name") and isinstance(n.name, str)] == ["f"]
    compile(older, "x", "exec")


@pytest.mark.parametrize(
    "source",
    [b"def f(:\n", b"\0\0\0", b"\xff\xfe\xfa", ("x = " + "(" * 3000 + ")" * 3000).encode(), b"x = 1" + b" + 1" * 40000],
    ids=["syntax", "nul", "bytes", "brackets", "sum"],
)
def test_broken_files_are_named_not_fatal(source: bytes) -> None:
    unit = units_of([])[0]
    facts = extract_one(unit, "x.py", source)
    assert isinstance(facts, list) or facts["failed"]


def test_progress_ends_with_done() -> None:
    seen: list[Progress] = []
    judge(tree_from_example(STOCK), progress=seen.append)
    assert seen[-1].stage == "done"
    assert any(p.provisional for p in seen)


def test_a_kept_judgement_imports_no_parser(tmp_path: Path) -> None:
    judge(tree_from_example(STOCK), cache=tmp_path)
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from rules.base import Example
        from rules.engine import judge
        from rules.tree import InstallTree
        from rules.examples import install
        from rules.testing import tree_from_example
        judgement = judge(tree_from_example(Example("stock", install(), "no")), cache=Path({str(tmp_path)!r}))
        print(judgement.facts, sorted(m for m in ("libcst", "paramiko", "rules.facts.flow") if m in sys.modules))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "known []"


def test_the_pack_is_small_and_made_by_these_rules() -> None:
    assert PACK.stat().st_size < 1_000_000
    rows = read_pack([*units_of(load_rules()), graph_unit()])
    assert len(rows) > 8000
    # Facts of stage 1 and of the slice are what costs time: they must be up to date.
    fresh = {unit.id for unit in [*units_of(load_rules()), graph_unit()]}
    stale = {"shapes", "tree-build", "tree-mask", "tree-commit", "graph"} - {n for row in rows.values() for n in row}
    assert not stale, f"make the pack anew (python -m rules.pack ...): {sorted(stale)} of {len(fresh)}"


def test_cache_rows_survive_another_rule_version(tmp_path: Path) -> None:
    store = Cache(tmp_path)
    store.put({"a": {"one": ["1", []]}})
    store.put({"a": {"two": ["2", [1]]}})
    assert json.dumps(store.rows(["a"])) == json.dumps({"a": {"one": ["1", []], "two": ["2", [1]]}})
