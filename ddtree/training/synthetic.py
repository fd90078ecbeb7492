"""A synthetic target for CPU: a tiny language model, a language it is fitted to, a tokenizer with a chat template.

Every stage runs on it in seconds, with the same code as on a real target.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

VOCAB = 96
SPECIAL = ["<pad>", "<eos>", "<bos>", "<mask>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
MASK = SPECIAL.index("<mask>")
PHRASES = 22
END = SPECIAL.index("<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def words() -> list[str]:
    """The vocabulary, special tokens first."""
    return [*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))]


def sample_language(count: int, length: int, seed: int) -> NDArray[np.int64]:
    """Sequences of a phrase language over the ordinary words: inside a phrase the next word is certain, at its end
    one of three phrases follows. Predictable in part, as text is."""
    fixed = np.random.default_rng(7)
    phrases = len(SPECIAL) + fixed.permutation(VOCAB - len(SPECIAL)).reshape(PHRASES, -1)
    follow = np.stack([fixed.permutation(PHRASES)[:3] for _ in range(PHRASES)])
    size = phrases.shape[1]
    rng = np.random.default_rng(seed)
    now, offset = rng.integers(0, PHRASES, count), rng.integers(0, size, count)
    out = np.zeros((count, length), np.int64)
    for t in range(length):
        out[:, t] = phrases[now, offset]
        offset += 1
        ended = offset == size
        now = np.where(ended, follow[now, rng.choice(3, count, p=(0.6, 0.25, 0.15))], now)
        offset[ended] = 0
    return out


def make_target(folder: Path, steps: int = 100, layers: int = 4, seed: int = 0) -> None:
    """Fit a tiny Llama to the language and save it, with its tokenizer, as a Hugging Face folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=0, eos_token_id=END,
        bos_token_id=2, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = torch.from_numpy(sample_language(24, 48, seed=1000 + step))
        ids[:, -1] = END
        logits = model(ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
    model.eval().save_pretrained(folder)
    make_tokenizer(folder)


def make_tokenizer(folder: Path, template: str = TEMPLATE) -> None:
    """A word-level tokenizer with a chat template, as files."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words())}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|end|>",
                "pad_token": "<pad>",
                "bos_token": "<bos>",
                "unk_token": "<pad>",
                "chat_template": template,
            }
        )
    )


def make_prompts(path: Path, count: int, seed: int = 1) -> None:
    """JSON lines of prompts in the language, with a few duplicates and an empty one, as real files have them."""
    names = words()
    rows: list[dict[str, Any]] = []
    for i, ids in enumerate(sample_language(count, 10, seed)):
        rows.append({"id": f"p{i}", "prompt": " ".join(names[t] for t in ids), "category": ("code", "chat")[i % 2]})
    rows += [{**rows[0], "id": "again"}, {"id": "empty", "prompt": ""}]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
