"""Acceptance semantics: the installed rejection sampler is fed hand-made drafts, and its answers say what it walks.
gpu: shared.

Three drafts tell chain from tree: one that is right throughout, one that is wrong in the middle, and one whose second
token is what the target wanted first (a sibling of the first). A chain commits 4, 2 and 1 tokens; a verifier that
takes the second token for a sibling commits more on the third. Runs in the host's Python with vLLM importable; the
sampler is vLLM's own, in the class the V1 runner builds."""

from __future__ import annotations

import os
import time
from typing import Any, Dict, List, Tuple

VOCABULARY = 32
#: (name, draft tokens, the target's best token in each of the n + 1 rows, committed by a chain, by a sibling walk)
CASES = (
    ("right throughout", (3, 5, 7), (3, 5, 7, 9), (3, 5, 7, 9), (3, 5, 7, 9)),
    ("wrong in the middle", (3, 6, 7), (3, 5, 7, 9), (3, 5), (3, 5)),
    ("second token is the first one's sibling", (4, 3, 8), (3, 11, 8, 9), (3,), (3, 8, 9)),
)  # type: Tuple[Tuple[str, Tuple[int, ...], Tuple[int, ...], Tuple[int, ...], Tuple[int, ...]], ...]


def sample(
    drafts: List[Tuple[int, ...]], rows: List[Tuple[int, ...]], temperature: float, device: Any
) -> List[List[int]]:
    """Tokens that the sampler commits for each request of one batch. Rows are peaked (40 against 0), so T=1 gives the
    same tokens."""
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    count = len(drafts)
    flat = [token for row in rows for token in row]
    logits = torch.zeros(len(flat), VOCABULARY, device=device)
    logits[torch.arange(len(flat)), torch.tensor(flat)] = 40.0
    metadata = SpecDecodeMetadata.make_dummy([list(draft) for draft in drafts], device)
    target, bonus, start = [], [], 0
    for draft in drafts:
        target += list(range(start, start + len(draft)))
        bonus.append(start + len(draft))
        start += len(draft) + 1
    metadata.target_logits_indices = torch.tensor(target, dtype=torch.int32, device=device)
    metadata.bonus_logits_indices = torch.tensor(bonus, dtype=torch.int32, device=device)
    metadata.logits_indices = torch.arange(start, dtype=torch.int32, device=device)
    greedy = temperature == 0.0
    nothing = torch.zeros(count, device=device)
    sampling = SamplingMetadata(
        temperature=None if greedy else torch.full((count,), temperature, device=device),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing + 1,
        output_token_ids=[[] for _ in range(count)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[list(draft) for draft in drafts],
    )
    output = RejectionSampler(Sampler())(metadata, None, logits, sampling).sampled_token_ids
    return [[token for token in row if token >= 0] for row in output.tolist()]


def take(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """{"semantics": "chain" | "tree" | "other", "cases": [...], "sampler", "device", "seconds"}."""
    start = time.monotonic()
    real, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    try:
        import torch
        from vllm.v1.sample import rejection_sampler

        device = torch.device(arguments.get("device", "cuda" if torch.cuda.is_available() else "cpu"))
        cases = []
        for temperature in (0.0, 1.0):
            together = sample([case[1] for case in CASES], [case[2] for case in CASES], temperature, device)
            for (name, draft, rows, chain, tree), batched in zip(CASES, together):
                alone = sample([draft], [rows], temperature, device)[0]
                cases.append(
                    {
                        "case": name,
                        "temperature": temperature,
                        "draft": list(draft),
                        "target": list(rows),
                        "committed": alone,
                        "committed_in_batch": batched,
                        "is_chain": alone == list(chain) == batched,
                        "is_tree": alone == list(tree) == batched,
                    }
                )
    finally:
        os.dup2(real, 1)
        os.close(real)
        os.close(quiet)
    all_chain = all(case["is_chain"] for case in cases)
    return {
        "semantics": "chain" if all_chain else "tree" if all(case["is_tree"] for case in cases) else "other",
        "cases": cases,
        "sampler": rejection_sampler.__file__,
        "device": str(device),
        "seconds": round(time.monotonic() - start, 2),
    }
