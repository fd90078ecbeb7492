"""What the native path must show on a GPU with a real vLLM, one engine per process, all experiments of a phase in it.

    python tests/native/gpu_check.py all OUT --target DIR --drafter DIR --problems HumanEval.jsonl.gz

``make test-gpu`` runs ``all``. Phases: plain, dflash, ddtree (see PHASES); each writes OUT/<name>.json, and ``report``
compares them: greedy equality with near-tie accounting, acceptance, speed. A phase goes on after a failed experiment.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
NEW_TOKENS = 128
ALONE = ("speed", "steps", "host", "profile")  # experiments that must not share the GPU
# Qwen3-8B's shape with random weights: step costs need no real ones. The drafter is z-lab's shape for it.
BIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "dtype": "bfloat16",
    "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BIG_DRAFTER = BIG | {
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "block_size": 16, "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
# name -> (method, draft tokens, further engine arguments, experiments)
PHASES: dict[str, tuple[str | None, int, dict[str, Any], tuple[str, ...]]] = {
    "plain": (None, 0, {}, ("greedy", "noise", "speed")),
    "dflash": ("dflash", 15, {}, ("greedy", "speed")),
    "eager": ("ddtree", 64, {"enforce_eager": True}, ("greedy", "forced", "random", "edges", "sampled")),
    "sync": ("ddtree", 16, {"enforce_eager": True, "async_scheduling": False}, ("greedy", "forced", "random", "edges")),
    "tree16": ("ddtree", 16, {}, ("greedy", "speed")),
    "tree64": ("ddtree", 64, {}, ("greedy", "forced", "random", "edges", "speed", "host")),
    "tree32": ("ddtree", 32, {}, ("greedy", "speed")),
    "big-dflash": ("dflash", 15, {"cudagraph_capture_sizes": [16, 128]}, ("steps",)),
    "big16": ("ddtree", 16, {"cudagraph_capture_sizes": [17, 136]}, ("steps",)),
    "big64": ("ddtree", 64, {"cudagraph_capture_sizes": [65, 520]}, ("steps", "profile")),
    "tree64f": ("ddtree", 64, {}, ("greedy", "forced", "random", "edges", "speed", "host")),
    "tree16f": ("ddtree", 16, {}, ("greedy", "speed")),
    "big16f": ("ddtree", 16, {"cudagraph_capture_sizes": [17, 136]}, ("steps",)),
    "big64f": ("ddtree", 64, {"cudagraph_capture_sizes": [65, 520]}, ("steps", "profile")),
    "tight": ("ddtree", 16, {"num_gpu_blocks_override": 160, "enforce_eager": True}, ("greedy", "edges")),
}


class Run:
    """One engine and the prompts; every experiment is a method that returns something JSON can hold."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        from vllm import LLM

        self.args, self.name = args, name
        self.method, self.drafts, extra, self.experiments = PHASES[name]
        target, drafter = args.target, args.drafter
        big = name.startswith("big")
        if big:
            target, drafter = write_config(args.out / "target", BIG), write_config(args.out / "drafter", BIG_DRAFTER)
        config: dict[str, Any] = {
            "model": str(target), "max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
            "dtype": os.environ.get("CHECK_DTYPE", "auto"), "kv_cache_memory_bytes": 3 << 30,
            "gpu_memory_utilization": 0.05, "disable_log_stats": False, "seed": 0,
        }  # fmt: skip
        if big:
            config |= {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": 8, "dtype": "bfloat16"}
        if self.method is not None:
            config["speculative_config"] = {
                "method": self.method,
                "model": str(drafter),
                "num_speculative_tokens": self.drafts,
            }
            if self.method == "ddtree":
                config["speculative_config"]["unproven"] = True
        self.llm = LLM(**(config | extra))
        if big:
            self.prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 150000 + 5 for i in range(512)]} for j in range(8)]
            return
        tokenizer = self.llm.get_tokenizer()
        self.prompts = [
            {"prompt_token_ids": tokenizer.apply_chat_template(
                [{"role": "user", "content": t}], add_generation_prompt=True, tokenize=True, return_dict=False)}
            for t in prompts(args.problems)
        ]  # fmt: skip

    def generate(self, prompts: list[Any], tokens: int = NEW_TOKENS, **params: Any) -> list[Any]:
        from vllm import SamplingParams

        params = {"temperature": 0.0, **params}
        return self.llm.generate(prompts, SamplingParams(max_tokens=tokens, **params), use_tqdm=False)

    def counters(self) -> dict[str, float]:
        found = {}
        for metric in self.llm.get_metrics():
            if metric.name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"):
                found[metric.name.rsplit(":", 1)[1]] = float(metric.value)
        return found

    def rounds(self, before: dict[str, float]) -> float:
        return self.counters().get("spec_decode_num_drafts", 0) - before.get("spec_decode_num_drafts", 0)

    def tau(self, before: dict[str, float]) -> float | None:
        """Tokens a round since then, bonus included; None without speculation."""
        rounds, key = self.rounds(before), "spec_decode_num_accepted_tokens"
        return round(1 + (self.counters()[key] - before.get(key, 0)) / rounds, 3) if rounds else None

    def greedy(self) -> dict[str, Any]:
        before = self.counters()
        outputs = self.generate(self.prompts, logprobs=2)
        tau = self.tau(before)
        gaps = []
        for o in outputs:
            ranked = [sorted((v.logprob for v in step.values()), reverse=True) for step in o.outputs[0].logprobs]
            gaps.append([round(r[0] - r[1], 4) if len(r) > 1 else 99.0 for r in ranked])
        return {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "gaps": gaps,
            "tau": tau,
        }

    def noise(self) -> dict[str, Any]:
        """Rounding of this engine: log-probabilities of one text, decoded token by token and read in one pass."""
        first = self.generate(self.prompts[:16], logprobs=0)
        worst = []
        for prompt, out in zip(self.prompts[:16], first, strict=True):
            ids = list(out.outputs[0].token_ids)
            whole = self.generate([{"prompt_token_ids": prompt["prompt_token_ids"] + ids}], 1, prompt_logprobs=0)[0]
            read = whole.prompt_logprobs[-len(ids) :]
            worst.append(max(abs(r[t].logprob - s[t].logprob)
                             for r, s, t in zip(read, out.outputs[0].logprobs, ids, strict=True)))  # fmt: skip
        return {"max": max(worst), "median_of_max": sorted(worst)[len(worst) // 2]}

    def forced(self) -> dict[str, Any]:
        """Trees that hold the known greedy continuation on a branch among junk: commits of every length and order."""
        import torch

        from ddtree.native.v1.proposer import DDTreeProposer

        known = {tuple(p["prompt_token_ids"]): o.outputs[0].token_ids
                 for p, o in zip(self.prompts[:24], self.generate(self.prompts[:24]), strict=True)}  # fmt: skip
        stock = DDTreeProposer.draft
        gen = torch.Generator().manual_seed(1)
        progress: dict[str, int] = {}

        def draft(proposer: Any, logits: Any, root_tokens: Any) -> Any:
            """Logits under which the right token has rank 0, 1 or 2 at every depth."""
            for r, root in enumerate(root_tokens.tolist()):
                request = proposer.runner.input_batch.req_ids[r]
                want = known.get(tuple(proposer.runner.requests[request].prompt_token_ids), ())
                start = progress.get(request, 0)
                done = next((i + 1 for i in range(start, min(start + 17, len(want))) if want[i] == root), None)
                if done is None:  # a prefill, or an output that has left the known one
                    continue
                progress[request] = done
                for k in range(min(logits.shape[1], len(want) - done)):
                    rank = int(torch.randint(0, 3, (), generator=gen))
                    junk = torch.randint(5, 40000, (3,), generator=gen)
                    logits[r, k].fill_(-20.0)
                    logits[r, k, junk.to(logits.device)] = torch.tensor([3.0, 2.0, 1.0]).to(logits)
                    logits[r, k, want[done + k]] = 3.5 - rank
            return stock(proposer, logits, root_tokens)

        DDTreeProposer.draft = draft
        try:
            before = self.counters()
            outputs = self.generate(self.prompts[:24])
            tau = self.tau(before)
        finally:
            DDTreeProposer.draft = stock
        return {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "tau": tau}

    def random(self) -> dict[str, Any]:
        """A drafter of noise: whatever it says, the output is plain decoding's."""
        import torch

        from ddtree.native.v1.proposer import DDTreeProposer

        stock = DDTreeProposer.draft
        DDTreeProposer.draft = lambda p, logits, root: stock(p, torch.randn_like(logits.float()) * 3, root)
        try:
            outputs = self.generate(self.prompts[:32])
        finally:
            DDTreeProposer.draft = stock
        return {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}

    def edges(self) -> dict[str, Any]:
        """Batch 1, prompts of 1+N tokens and around, prefix cache warm, stops, max_model_len, mixed batches, chains."""
        from vllm import SamplingParams

        size = (self.drafts or 15) + 1
        found: dict[str, Any] = {"batch1": [list(self.generate([p])[0].outputs[0].token_ids) for p in self.prompts[:4]]}
        long = [t for p in self.prompts[:12] for t in p["prompt_token_ids"]]
        cut = [{"prompt_token_ids": long[:n]} for n in (1, size - 1, size, size + 1, 2 * size, 900)]
        found["lengths"] = [list(o.outputs[0].token_ids) for o in self.generate(cut, 48)]
        found["warm"] = [list(o.outputs[0].token_ids) for o in self.generate(cut, 48)]
        last = self.generate([{"prompt_token_ids": long[:900]}], 2000, ignore_eos=True)
        found["to_the_end"] = [len(o.outputs[0].token_ids) for o in last]
        stop = self.generate(self.prompts[:8], 64, stop=["\n\n"])
        found["stop"] = [list(o.outputs[0].token_ids) for o in stop]
        kinds = [
            SamplingParams(temperature=0, max_tokens=48, min_tokens=8),
            SamplingParams(temperature=0, max_tokens=48, repetition_penalty=1.2),
            SamplingParams(temperature=0, max_tokens=48, presence_penalty=0.5, frequency_penalty=0.3),
            SamplingParams(temperature=0, max_tokens=48, bad_words=["return"]),
            SamplingParams(temperature=0, max_tokens=48),
        ]
        mixed = self.llm.generate(self.prompts[: len(kinds)], kinds, use_tqdm=False)
        found["mixed"] = [list(o.outputs[0].token_ids) for o in mixed]
        return found

    def sampled(self) -> dict[str, Any]:
        """T = 1: distribution of the second and third token of one prompt, to be compared with exact probabilities."""
        n = 2000
        outputs = self.generate([self.prompts[3]] * n, 3, temperature=1.0, top_k=8, ignore_eos=True)
        counts: dict[str, int] = {}
        for o in outputs:
            key = " ".join(map(str, o.outputs[0].token_ids))
            counts[key] = counts.get(key, 0) + 1
        exact: dict[str, float] = {}
        tops = self.generate([self.prompts[3]], 1, logprobs=8)[0].outputs[0].logprobs[0]
        level = [((), 1.0, tops)]
        for _ in range(3):
            following = []
            for prefix, mass, dist in level:
                top = sorted(dist.items(), key=lambda kv: -kv[1].logprob)[:8]
                total = sum(2.718281828459045 ** v.logprob for _, v in top)
                for token, v in top:
                    following.append(((*prefix, token), mass * 2.718281828459045**v.logprob / total))
            if len(following[0][0]) == 3:
                exact = {" ".join(map(str, k)): m for k, m in following}
                break
            asks = [{"prompt_token_ids": self.prompts[3]["prompt_token_ids"] + list(k)} for k, _ in following]
            answers = self.generate(asks, 1, logprobs=8)
            level = [(k, m, a.outputs[0].logprobs[0]) for (k, m), a in zip(following, answers, strict=True)]
        likely = sorted(exact.items(), key=lambda kv: -kv[1])[:40]
        rest = 1 - sum(m for _, m in likely)
        chi = sum((counts.get(k, 0) - n * m) ** 2 / (n * m) for k, m in likely if n * m >= 5)
        cells = sum(1 for _, m in likely if n * m >= 5)
        return {"n": n, "chi2": chi, "cells": cells, "rest_expected": rest,
                "rest_seen": 1 - sum(counts.get(k, 0) for k, _ in likely) / n}  # fmt: skip

    def speed(self) -> dict[str, Any]:
        """Tokens per second at batch 1, 8 and 64, greedy, after one warm-up of the same shape."""
        found: dict[str, Any] = {}
        for batch, tokens in ((1, 192), (8, 192), (64, 192)):
            groups = [self.prompts[i : i + batch] for i in range(0, len(self.prompts), batch)][: max(1, 8 // batch)]
            self.generate(groups[0], 32)
            before, start, made = self.counters(), time.perf_counter(), 0
            for group in groups:
                made += sum(len(o.outputs[0].token_ids) for o in self.generate(group, tokens, detokenize=False))
            seconds = time.perf_counter() - start
            steps = (self.rounds(before) or made) / batch
            found[str(batch)] = {
                "tokens_per_s": round(made / seconds, 1),
                "tau": self.tau(before),
                "ms_per_step": round(seconds / steps * 1e3, 3),
            }
        return found

    def steps(self) -> dict[str, Any]:
        """Milliseconds a step at context 512: the difference of two lengths, so that the prefill drops out."""
        found = {}
        for batch in (1, 8):
            taken = {}
            for tokens in (16, 16, 144):  # the first warms up
                before, start = self.counters(), time.perf_counter()
                made = self.generate(self.prompts[:batch], tokens, ignore_eos=True, detokenize=False)
                seconds = time.perf_counter() - start
                steps = self.rounds(before) or sum(len(o.outputs[0].token_ids) for o in made)
                taken[tokens] = (seconds, steps / batch)
            (short, few), (long, many) = taken[16], taken[144]
            found[str(batch)] = round((long - short) / (many - few) * 1e3, 3)
        return found

    def host(self) -> dict[str, Any]:
        """Where the host's time goes in steady decoding: functions by own time, milliseconds a step."""
        import cProfile
        import pstats

        found = {}
        for batch in (1, 64):
            self.generate(self.prompts[:batch], 32, detokenize=False)
            recorded, before = cProfile.Profile(), self.counters()
            recorded.enable()
            self.generate(self.prompts[:batch], 160, ignore_eos=True, detokenize=False)
            recorded.disable()
            steps = max(self.rounds(before) / batch, 1)
            rows = sorted(pstats.Stats(recorded).stats.items(), key=lambda kv: -kv[1][2])
            found[str(batch)] = [
                [f"{Path(f).name}:{line} {name}", calls, round(own / steps * 1e3, 3), round(all_in / steps * 1e3, 3)]
                for (f, line, name), (calls, _, own, all_in, _) in rows[:45]
            ]
        return found

    def profile(self) -> dict[str, Any]:
        """Host waits and the longest kernels of a few decode steps at batch 1."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            self.generate(self.prompts[:1], 24, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        events = recorded.key_averages()
        waits = {e.key: e.count for e in events if "ynchronize" in e.key}
        kernels = sorted((e for e in events if e.device_type.name == "CUDA"), key=lambda e: -e.self_device_time_total)
        return {
            "waits": waits,
            "kernels": [[e.key[:90], e.count, round(e.self_device_time_total / 1e3, 2)] for e in kernels[:22]],
            "launches": {e.key: e.count for e in events if "aunch" in e.key},
        }


def prompts(path: Path) -> list[str]:
    """HumanEval prompts as chat messages."""
    with gzip.open(path, "rt") as lines:
        return ["Complete this Python function.\n```python\n" + json.loads(line)["prompt"] + "```" for line in lines]


def phase(args: argparse.Namespace, name: str) -> None:
    started = time.perf_counter()
    result: dict[str, Any] = {"name": name, "errors": {}}
    out, lock = args.out / f"{name}.json", None
    try:
        run = Run(args, name)
        result["start_s"] = round(time.perf_counter() - started, 1)
        chosen = [e for e in run.experiments if not args.only or e in args.only]
        for experiment in sorted(chosen, key=lambda e: e in ALONE):
            if experiment in ALONE and lock is None:
                lock = alone(args.out, name)
            at = time.perf_counter()
            try:
                result[experiment] = getattr(run, experiment)()
            except Exception:
                result["errors"][experiment] = traceback.format_exc(limit=-12)
                print(f"[{name}] {experiment} failed\n{traceback.format_exc(limit=-12)}", flush=True)
            print(f"[{name}] {experiment}: {time.perf_counter() - at:.1f} s", flush=True)
            out.write_text(json.dumps(result))
    except Exception:
        result["errors"]["start"] = traceback.format_exc(limit=-14)
        print(f"[{name}] start failed\n{traceback.format_exc(limit=-14)}", flush=True)
    out.write_text(json.dumps(result))


def alone(out: Path, name: str) -> Any:
    """Wait until every other phase has started, then for the turn; the lock is held until the process ends."""
    (out / f"{name}.ready").touch()
    peers = [p for p in os.environ.get("CHECK_PEERS", "").split(",") if p]
    while not all((out / f"{p}.ready").exists() for p in peers):
        time.sleep(0.2)
    lock = (out / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def first_difference(a: list[int], b: list[int]) -> int | None:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), None if len(a) == len(b) else n)


def compare(plain: dict[str, Any], tokens: list[list[int]]) -> dict[str, Any]:
    """Where outputs leave plain decoding's, with the plain gap there (0 is a tie)."""
    found = []
    for i, made in enumerate(tokens):
        want = plain["tokens"][i][: len(made)] if len(made) < len(plain["tokens"][i]) else plain["tokens"][i]
        at = first_difference(want, made)
        if at is not None:
            gaps = plain["gaps"][i]
            found.append((i, at, gaps[min(at, len(gaps) - 1)]))
    return {"differ": len(found), "of": len(tokens), "gaps": sorted((round(g, 4) for *_, g in found), reverse=True)}


def report(args: argparse.Namespace) -> None:
    results = {p.stem: json.loads(p.read_text()) for p in sorted(args.out.glob("*.json"))}
    plain = results.get("plain", {}).get("greedy")
    noise = results.get("plain", {}).get("noise")
    print("rounding of plain vLLM:", noise)
    for name, result in results.items():
        print(f"== {name} start {result.get('start_s')} s, errors: {list(result['errors'])}")
        for experiment in ("greedy", "forced", "random"):
            if plain and experiment in result and name != "plain":
                c = compare(plain, result[experiment]["tokens"])
                tau = result[experiment].get("tau")
                print(f"   {experiment}: {c['differ']}/{c['of']} differ, tau {tau}, gaps {c['gaps'][:12]}")
        if "edges" in result and plain:
            e = result["edges"]
            b1 = compare(plain, e["batch1"])
            print(f"   edges: batch1 {b1['differ']}/{b1['of']} {b1['gaps']}, warm==cold {e['warm'] == e['lengths']}, "
                  f"to_the_end {e['to_the_end']}, lengths {[len(x) for x in e['lengths']]}")  # fmt: skip
        for experiment in ("speed", "steps", "sampled", "host", "profile"):
            if experiment in result:
                print(f"   {experiment}: {json.dumps(result[experiment])}")
        for where, text in result["errors"].items():
            print(f"   ERROR in {where}: {text.strip().splitlines()[-1][:300]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="all, report, or phases separated by commas")
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--only", type=lambda s: s.split(","), help="experiments, separated by commas")
    parser.add_argument("--parallel", action="store_true", help="phases at the same time (not for speed)")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one phase")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = [n for n in PHASES if not n.endswith("f")] if args.what == "all" else args.what.split(",")
    if args.what != "report":
        if len(names) == 1:
            phase(args, names[0])
            return 0
        if args.parallel:
            os.environ["CHECK_PEERS"] = ",".join(names)
        running: list[tuple[str, subprocess.Popen[bytes]]] = []
        for name in names:
            command = [sys.executable, __file__, name, *(c for c in sys.argv[2:] if c != "--parallel")]
            fast = {"DDTREE_ATTENTION": "fused", "DDTREE_TOP": "kernel"} if name.endswith("f") else {}
            environment = os.environ | fast
            log = (args.out / f"{name}.log").open("w")
            running.append((name, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)))
            if not args.parallel:
                wait(running[-1:], args)
        wait(running, args)
    report(args)
    return 0


def wait(running: list[tuple[str, subprocess.Popen[bytes]]], args: argparse.Namespace) -> None:
    """Until all have ended; whoever ends holds nobody up, and the limit ends the rest."""
    end = time.monotonic() + args.limit
    while any(child.poll() is None for _, child in running):
        for name, child in running:
            if child.poll() is not None:
                (args.out / f"{name}.ready").touch()
            elif time.monotonic() > end:
                child.kill()
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
