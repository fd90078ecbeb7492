"""Tables and model cards: what a replay found, for programs and for people."""

from __future__ import annotations

import json
from typing import Any

from ddtree.training.replay import CHAIN, Replay, lookup_rounds
from ddtree.training.tokens import TokenSet


def report(result: Replay, data: TokenSet, block: int, samples: int = 1000) -> dict[str, Any]:
    """Table of a replay, with prompt lookup and the share of looping responses."""
    lookup = lookup_rounds(data, result.rows.tolist(), block - 1)
    return {
        "definition": "tau = tokens committed per round, bonus included; greedy or sample match; micro",
        "samplers": [m["identity"].get("sampler") for m in data.manifests],
        "block": block,
        "responses": len(result.rows),
        "looping": float(result.looping.mean()),
        "prompt_lookup": {
            "tau": lookup.tau(), "interval": lookup.interval(samples=samples),
            "tau_not_looping": lookup.tau(~result.looping),
            "interval_not_looping": lookup.interval(~result.looping, samples),
        },
        "rules": result.table(samples),
    }  # fmt: skip


def eval_text(table: dict[str, Any]) -> str:
    """The table for people."""

    def span(pair: Any) -> str:
        return f"[{pair[0]:.2f}, {pair[1]:.2f}]"

    lookup = table["prompt_lookup"]
    lines = [
        f"{table['responses']} responses, {table['looping']:.0%} looping; {table['definition']}",
        f"{'rule':14}{'tau':>6}  {'95%':14}{'macro':>6}{'not looping':>13}  conditional acceptance by position",
        f"{'prompt lookup':14}{lookup['tau']:6.2f}  {span(lookup['interval']):14}{'':6}"
        f"{lookup['tau_not_looping']:13.2f}",
    ]
    for rule, row in table["rules"].items():
        by_position = " ".join(f"{x:.2f}" for x in row["conditional"][:8])
        lines.append(
            f"{rule:14}{row['tau']:6.2f}  {span(row['interval']):14}{row['macro']:6.2f}"
            f"{row['tau_not_looping']:13.2f}  {by_position}"
        )
    categories = table["rules"][CHAIN]["by_category"]
    if len(categories) > 1:
        lines.append("by category (chain): " + ", ".join(f"{c} {t:.2f}" for c, t in categories.items()))
    return "\n".join(lines)


def card(name: str, run: dict[str, Any], table: dict[str, Any] | None, config: dict[str, Any]) -> str:
    """The export's README: what it is for, how it was made, what was measured."""
    d, target = config["dflash_config"], run.get("identity", {}).get("target", {})
    t = run.get("train", {})
    serving = {"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": config["block_size"] - 1}
    lines = [
        f"# {name}", "",
        f"A DFlash drafter for {target.get('name', 'its target')} ({target.get('architecture', '')}): "
        f"{config['num_hidden_layers']} layers, block {config['block_size']}, target layers "
        f"{', '.join(map(str, d['target_layer_ids']))}, mask token {d['mask_token_id']}.", "",
        f"Target weights (fingerprint): `{target.get('weights', 'unknown')}`. Another target, or the same one with "
        "another chat template or thinking mode, gets less from it.", "",
        "## Use", "",
        "    vllm serve TARGET --speculative-config "
        f"'{json.dumps(serving)}'", "",
        "## Training", "",
    ]  # fmt: skip
    if t:
        loss = t["loss"]["kind"]
        length = f"{run['steps']:,} steps" if "steps" in run else f"{t['epochs']} epochs"
        lines += [f"Loss {loss}, {length}, {t['rows_per_step']} packed rows of {t['shape']['width']} tokens a step, "
                  f"seed {t['seed']}.", ""]  # fmt: skip
        lines += [f"- {d['rows']:,} responses, {d['tokens']:,} tokens, sampler {json.dumps(d['sampler'])}"
                  for d in run["identity"].get("data", [])]  # fmt: skip
        lines.append("")
    if table:
        lines += ["## Acceptance", "", "```", eval_text(table), "```", ""]
    return "\n".join(lines)
