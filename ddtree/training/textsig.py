"""Word n-gram hashes and MinHash signatures of many texts at once, without a Python loop over words.

Texts are normalised to lower-case words with one space between. With C the running sum of byte_i * p**i modulo
2**64 and p odd, a substring's hash is (C[end] - C[start]) * p**-start: any word n-gram costs two look-ups. MinHash
is Broder 1997; banding is the usual LSH: b bands of r rows find a pair of Jaccard similarity s with probability 1 -
(1 - s**r)**b.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
_WORD = re.compile(r"\w+")
_P = 0x9E3779B97F4A7C15
BANDS, ROWS = 32, 4
PERMUTATIONS = BANDS * ROWS
SHINGLE = 3


def normalise_words(text: str) -> str:
    """NFKC, lower case, words only, one space between: what duplicates are compared by."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return " ".join(_WORD.findall(text.lower()))


def mix64(x: U64) -> U64:
    """splitmix64 finaliser: a bijection of 64-bit integers that spreads every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class _Powers:
    """p**i and p**-i modulo 2**64, grown on demand."""

    def __init__(self) -> None:
        self.up = np.ones(1, np.uint64)
        self.down = np.ones(1, np.uint64)

    def get(self, n: int) -> tuple[U64, U64]:
        if len(self.up) < n:
            size = max(n, 2 * len(self.up))
            factors = np.full(size, _P, np.uint64)
            factors[0] = 1
            self.up = np.multiply.accumulate(factors)
            factors[1:] = pow(_P, -1, 1 << 64)
            self.down = np.multiply.accumulate(factors)
        return self.up, self.down


_POWERS = _Powers()


@dataclass(frozen=True)
class Grams:
    """Word n-gram hashes of a batch: those of text i are ``hashes[bounds[i]:bounds[i+1]]``."""

    hashes: U64
    bounds: NDArray[np.int64]

    @property
    def owner(self) -> NDArray[np.int64]:
        """Text index of every hash."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))


def word_grams(texts: Sequence[str], n: int) -> Grams:
    """All n-word hashes of normalised texts. A shorter text has one hash, of its whole; an empty one has none."""
    blob = np.frombuffer((" ".join(texts) + " ").encode(), np.uint8)
    up, down = _POWERS.get(len(blob) + 1)
    running = np.zeros(len(blob) + 1, np.uint64)
    np.cumsum((blob.astype(np.uint64) + np.uint64(1)) * up[: len(blob)], out=running[1:])
    ends = np.flatnonzero(blob == 32)  # one after each word; an empty text adds an empty word
    starts = np.concatenate([[0], ends[:-1] + 1])
    words = np.array([t.count(" ") + 1 for t in texts], np.int64)  # an empty text still holds one (empty) slot
    first = np.concatenate([[0], np.cumsum(words)])
    empty = np.array([not t for t in texts], bool)
    grams = np.where(empty, 0, np.maximum(words - n + 1, 1))
    bounds = np.concatenate([[0], np.cumsum(grams)])
    owner = np.repeat(np.arange(len(texts)), grams)
    begin = first[owner] + (np.arange(bounds[-1]) - bounds[owner])
    last = begin + np.minimum(n, words[owner]) - 1
    a, b = starts[begin], ends[last]
    return Grams(mix64((running[b] - running[a]) * down[a] + (b - a).astype(np.uint64)), bounds)


@dataclass(frozen=True)
class Signatures:
    """Per text: BANDS band keys (uint64) and PERMUTATIONS low bytes of the MinHash (uint8), for the estimate."""

    bands: U64
    low: NDArray[np.uint8]


def _permutations() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    key = mix64(np.arange(1, 2 * PERMUTATIONS + 1, dtype=np.uint64) * np.uint64(_P))
    return (key[:PERMUTATIONS] | np.uint64(1)).astype(np.uint32), key[PERMUTATIONS:].astype(np.uint32)


def signatures(texts: Sequence[str]) -> Signatures:
    """MinHash of the 3-word shingles of normalised, non-empty texts."""
    grams = word_grams(texts, SHINGLE)
    # 32-bit arithmetic: half the memory traffic, and 2**32 values are plenty for one text's shingles.
    h = (grams.hashes >> np.uint64(32)).astype(np.uint32)
    multiply, add = _permutations()
    mins = np.empty((PERMUTATIONS, len(texts)), np.uint32)
    scratch = np.empty_like(h)
    for i in range(PERMUTATIONS):
        np.multiply(h, multiply[i], out=scratch)
        np.add(scratch, add[i], out=scratch)
        # multiply-shift keeps its quality in the high bits; fold them down so that the low byte is usable too
        np.bitwise_xor(scratch, scratch >> np.uint32(15), out=scratch)
        mins[i] = np.minimum.reduceat(scratch, grams.bounds[:-1])
    keys = np.zeros((len(texts), BANDS), np.uint64)
    for band in range(BANDS):
        key = np.full(len(texts), band + 1, np.uint64)
        for row in mins[band * ROWS : (band + 1) * ROWS]:
            key = mix64(key * np.uint64(_P) + row.astype(np.uint64))
        keys[:, band] = key
    return Signatures(keys, (mins & np.uint32(0xFF)).astype(np.uint8).T.copy())


def similarity(low: NDArray[np.uint8], a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimated Jaccard similarity of the pairs (a[i], b[i]); chance agreement of a byte (1/256) is taken out."""
    out = np.empty(len(a))
    for i in range(0, len(a), 1 << 16):
        same = (low[a[i : i + (1 << 16)]] == low[b[i : i + (1 << 16)]]).mean(1)
        out[i : i + (1 << 16)] = (same - 1 / 256) / (1 - 1 / 256)
    return out


def near_duplicates(sigs: Signatures, order: NDArray[np.int64], threshold: float) -> NDArray[np.int64]:
    """For each text, the earliest text of ``order`` in its group of near-duplicates (itself when it has none).

    Candidates share a band. In a band's bucket each member is compared with the bucket's earliest member; groups are
    joined transitively through their representatives.
    """
    count = len(sigs.low)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    parent = np.arange(count)

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = int(parent[i])
        return i

    for band in range(sigs.bands.shape[1]):
        key = sigs.bands[:, band]
        by_key = np.lexsort((rank, key))
        sorted_key = key[by_key]
        new = np.concatenate([[True], sorted_key[1:] != sorted_key[:-1]])
        leader = by_key[np.maximum.accumulate(np.where(new, np.arange(count), 0))]
        a, b = leader[~new], by_key[~new]
        open_pairs = parent[a] != parent[b]
        a, b = a[open_pairs], b[open_pairs]
        close = similarity(sigs.low, a, b) >= threshold
        for x, y in zip(a[close].tolist(), b[close].tolist(), strict=True):
            x, y = find(x), find(y)
            if x != y:
                first, second = (x, y) if rank[x] < rank[y] else (y, x)
                parent[second] = first
    return np.array([find(i) for i in range(count)], np.int64)
