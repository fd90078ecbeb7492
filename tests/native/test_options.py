"""Options of method "ddtree": what is accepted, what is refused and with which words."""

from __future__ import annotations

import pytest

from ddtree.native.options import (
    OptionError,
    Options,
    block_size_of,
    capture_sizes,
    check_scheduler,
    resolve,
    split_options,
)


def test_their_config_is_dflash_and_ours_is_taken_out():
    given = {"method": "ddtree", "model": "D", "num_speculative_tokens": 64, "horizon": 7, "top_k": 4, "revision": "x"}
    theirs, ours = split_options(given)
    assert theirs == {"method": "dflash", "model": "D", "num_speculative_tokens": 64, "revision": "x"}
    assert ours == {"horizon": 7, "top_k": 4, "budget": 64}
    assert given["method"] == "ddtree"


def test_budget_is_another_name_of_num_speculative_tokens():
    assert split_options({"method": "ddtree", "budget": 32})[0]["num_speculative_tokens"] == 32
    assert split_options({"method": "ddtree", "budget": 32, "num_speculative_tokens": 32})[1]["budget"] == 32
    with pytest.raises(OptionError, match=r'"budget" is 32 and "num_speculative_tokens" is 64'):
        split_options({"method": "ddtree", "budget": 32, "num_speculative_tokens": 64})
    with pytest.raises(OptionError, match="no tree budget"):
        split_options({"method": "ddtree", "model": "D"})


def test_defaults_follow_the_drafter():
    assert resolve({"budget": 64}, 16) == Options(64, 15, 16)
    assert resolve({"budget": 8}, 16) == Options(8, 8, 8)
    assert resolve({"budget": 64}, None).horizon == 15
    assert resolve({"budget": 64}, 8).horizon == 7


@pytest.mark.parametrize(
    "ours, code, words",
    [
        ({"budget": 0}, "ddtree-option-range", "budget 0 is outside 1..256"),
        ({"budget": 1000}, "ddtree-option-range", "budget 1000"),
        ({"budget": True}, "ddtree-option-type", "whole number"),
        ({"budget": "64"}, "ddtree-option-type", "whole number"),
        ({"budget": 64, "horizon": 16}, "ddtree-option-range", "block size 16 less the root"),
        ({"budget": 8, "horizon": 12}, "ddtree-horizon", "no path can be longer"),
        ({"budget": 64, "top_k": 65}, "ddtree-option-range", "top_k 65 is outside 1..64"),
        ({"budget": 64, "unproven": "yes"}, "ddtree-option-type", "true or false"),
        ({"budget": 64, "tree_width": 3}, "ddtree-option-unknown", "tree_width"),
        ({}, "ddtree-budget-missing", "no tree budget"),
    ],
)
def test_refused_by_name(ours, code, words):
    with pytest.raises(OptionError, match=words) as caught:
        resolve(ours, 16)
    assert caught.value.code == code


def test_scheduler_arithmetic():
    with pytest.raises(OptionError, match="a tree of 64 nodes is 65 rows, and max_num_batched_tokens is 60"):
        check_scheduler(64, 60, 4)
    note = check_scheduler(64, 8192, 256)
    assert note is not None and "hold 126 trees of 65 rows" in note and "256 whole trees need 16640" in note
    assert check_scheduler(16, 8192, 64) is None


def test_graphs_hold_whole_trees():
    assert capture_sizes(64, 64, 8192)[:4] == [65, 130, 195, 260]
    assert all(size % 17 == 0 for size in capture_sizes(16, 64, 8192))
    assert max(capture_sizes(16, 4, 8192)) == 68
    assert capture_sizes(64, 256, 8192)[-1] <= 2112
    assert capture_sizes(250, 1, 8192) == [251]


def test_block_size_of_either_layout():
    assert block_size_of({"block_size": 16}) == 16
    assert block_size_of({"dflash_config": {"block_size": 8}}) == 8
    assert block_size_of({"dflash_config": None}) is None
