"""What the wrapped functions do to EngineArgs and to a finished config, on objects of their shape.

vLLM's own argument code needs its compiled extensions even to resolve a model, so the whole path runs in the GPU tests.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ddtree.native.adapters import Fit
from ddtree.native.config import (
    _free_draft_slots,
    asked,
    claim_graphs,
    claim_worker,
    refuse_unsupported,
    require_fit,
    translate,
)
from ddtree.native.options import OptionError, Options


def args(speculative=None, additional=None, **more):
    base = {"speculative_config": speculative, "additional_config": additional or {}, "spec_method": None,
            "spec_model": None, "spec_tokens": None}  # fmt: skip
    return SimpleNamespace(**(base | more))


@pytest.fixture
def drafter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 16}))
    return str(tmp_path)


def test_nobody_asked():
    assert not asked(args())
    assert not asked(args({"method": "dflash", "model": "D", "num_speculative_tokens": 15}))
    assert asked(args({"method": "ddtree"})) and asked(args(spec_method="ddtree"))
    assert asked(args({"method": "dflash"}, {"ddtree": {}}))


def test_method_ddtree_becomes_dflash_once(drafter):
    given = args({"method": "ddtree", "model": drafter, "num_speculative_tokens": 64, "top_k": 8}, {"other": 1})
    for _ in range(2):
        translate(given)
        assert given.speculative_config == {"method": "dflash", "model": drafter, "num_speculative_tokens": 64}
        assert given.additional_config == {
            "other": 1, "ddtree": {"budget": 64, "horizon": 15, "top_k": 8, "unproven": False}
        }  # fmt: skip


def test_flags_are_the_same_as_the_json(drafter):
    given = args(spec_method="ddtree", spec_model=drafter, spec_tokens=32)
    translate(given)
    assert given.speculative_config == {"method": "dflash", "model": drafter, "num_speculative_tokens": 32}
    assert given.spec_method is None and given.spec_tokens is None


def test_the_form_without_patches(drafter):
    given = args({"method": "dflash", "model": drafter, "num_speculative_tokens": 64}, {"ddtree": {"horizon": 12}})
    translate(given)
    assert given.additional_config["ddtree"]["budget"] == 64 and given.additional_config["ddtree"]["horizon"] == 12


def test_contradictions(drafter):
    with pytest.raises(OptionError, match="speculative method is 'eagle3'"):
        translate(args({"method": "eagle3", "num_speculative_tokens": 4}, {"ddtree": {}}))
    with pytest.raises(OptionError, match="budget 32, num_speculative_tokens 64"):
        given = {"method": "dflash", "model": drafter, "num_speculative_tokens": 64}
        translate(args(given, {"ddtree": {"budget": 32}}))
    with pytest.raises(OptionError, match="block size 16"):
        translate(args({"method": "ddtree", "model": drafter, "num_speculative_tokens": 64, "horizon": 31}))


def test_an_install_without_an_adapter_is_refused():
    with pytest.raises(OptionError, match=r"no adapter fits vLLM 9\.9: x is gone") as caught:
        require_fit(Fit("9.9", None, None, False, ("x is gone",), 90), unproven=True)
    assert caught.value.code == "ddtree-no-adapter"
    unproven = Fit("0.24.0", "0.24.0", "ddtree.native.v1", False, (), 90)
    with pytest.raises(OptionError, match="not run on a GPU"):
        require_fit(unproven, unproven=False)
    require_fit(unproven, unproven=True)


def test_graph_sizes_are_ours_only_where_nobody_chose():
    compilation = SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=None)
    base = {"enforce_eager": False, "cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None,
            "compilation_config": compilation, "max_num_seqs": 4, "max_num_batched_tokens": None}  # fmt: skip
    ours = SimpleNamespace(**base)
    claim_graphs(ours, Options(64, 15, 16))
    assert ours.cudagraph_capture_sizes == [65, 130, 195, 260]
    for chosen in ({"cudagraph_capture_sizes": [1]}, {"max_cudagraph_capture_size": 128}, {"enforce_eager": True}):
        theirs = SimpleNamespace(**(base | chosen))
        claim_graphs(theirs, Options(64, 15, 16))
        assert theirs.cudagraph_capture_sizes == chosen.get("cudagraph_capture_sizes")


def config(**changes):
    parts = {
        "parallel_config": {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "use_ubatching": False,
                            "prefill_context_parallel_size": 1, "worker_cls": "vllm.v1.worker.gpu_worker.Worker"},
        "model_config": {"is_hybrid": False, "is_encoder_decoder": False, "use_mla": False, "uses_mrope": False,
                         "uses_xdrope_dim": 0, "enable_prompt_embeds": False},
        "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
        "speculative_config": {"disable_padded_drafter_batch": False, "rejection_sample_method": "standard"},
    }  # fmt: skip
    for key, value in changes.items():
        part, name = key.split("__")
        parts[part][name] = value
    return SimpleNamespace(use_v2_model_runner=False, **{k: SimpleNamespace(**v) for k, v in parts.items()})


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__use_ubatching": True}, "ubatching"),
        ({"model_config__is_hybrid": True}, "a hybrid target"),
        ({"model_config__uses_mrope": True}, "M-RoPE"),
        ({"cache_config__cache_dtype": "fp8"}, "KV cache dtype fp8"),
        ({"speculative_config__rejection_sample_method": "synthetic"}, "rejection method synthetic"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, named):
    refuse_unsupported(config())
    with pytest.raises(OptionError, match=named):
        refuse_unsupported(config(**changes))


def test_a_foreign_worker_is_not_replaced():
    stock = config()
    claim_worker(stock)
    claim_worker(stock)
    assert stock.parallel_config.worker_cls == "ddtree.native.v1.worker.DDTreeWorker"
    with pytest.raises(OptionError, match=r"some\.Worker is not the stock"):
        claim_worker(config(parallel_config__worker_cls="some.Worker"))


def test_reserved_rows_are_freed_for_ddtree_alone():
    class Speculative:
        num_speculative_tokens = 64

        @property
        def max_num_new_slots_for_drafting(self) -> int:
            return self.num_speculative_tokens - 1

    ours, theirs = Speculative(), Speculative()
    ours.ddtree = True
    _free_draft_slots(Speculative)
    _free_draft_slots(Speculative)
    assert ours.max_num_new_slots_for_drafting == 0
    assert theirs.max_num_new_slots_for_drafting == 63
