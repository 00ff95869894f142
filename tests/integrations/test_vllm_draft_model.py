"""The draft model's programs in the engine's own classes; where vllm-tpu is installed.

The model is a stand-in without attention, so what is seen here is who takes in what, on how many
ranks, and what is compiled; benchmarks/vllm_engine.py drafts with models.
"""

from __future__ import annotations

import importlib.util
import logging
from itertools import chain
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if importlib.util.find_spec("tpu_inference") is None:
    pytest.skip(
        "vllm-tpu is not installed: pip install vllm-tpu==0.32.0 (Python 3.12, 11 GB)",
        allow_module_level=True,
    )

from tpu_inference.layers.common.attention_metadata import AttentionMetadata

from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.integrations.vllm_tpu.draft_model import DraftModelProposer

VOCAB, K, ROWS, LIMIT, SIZE = 12, 7, 3, 64, 16
TEXTS = {"a": [1, 2, 3, 4] * 2, "b": [5], "c": [*range(11)]}
ROWS_OF = {1: ["a", "b", None], 2: ["c", None, None, "b", "a", None]}


def after(token: Any) -> Any:
    """The model's next token: texts come round to their beginnings."""
    return (token + 1) % VOCAB


def passed(
    leaves: Any, caches: list[jax.Array], tokens: jax.Array, metadata: Any, *_: Any
) -> tuple[list[jax.Array], jax.Array]:
    return [one + 1 for one in caches], jax.nn.one_hot(after(tokens), VOCAB)


def made(ranks: int, lookup: Lookup | None, monkeypatch: pytest.MonkeyPatch) -> DraftModelProposer:
    mesh = jax.make_mesh((ranks, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model = SimpleNamespace(
        model=SimpleNamespace(step_fn_no_options=passed),
        compute_logits_fn=lambda leaves, hidden, lora: hidden,
        state=None,
        state_leaves=[],
    )
    loader = "tpu_inference.models.common.model_loader.get_flax_model"
    monkeypatch.setattr(loader, lambda config, key, mesh: model)
    draft = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        get_num_layers=lambda parallel: 1,
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=draft, method="draft_model", num_speculative_tokens=K,
            use_gemma4_mtp=lambda: False,
        ),
        cache_config=SimpleNamespace(block_size=SIZE),
        model_config=SimpleNamespace(seed=0),
        parallel_config=None,
    )  # fmt: skip
    runner = SimpleNamespace(
        mesh=mesh,
        max_num_tokens=2 * SIZE,
        max_num_reqs=ranks * ROWS,
        max_model_len=LIMIT,
        max_num_blocks_per_req=LIMIT // SIZE,
        dp_size=ranks,
        num_tokens_paddings=[ranks * SIZE],
        attn_num_reqs_paddings=[ranks * ROWS],
        layer_name_to_kvcache_index={"draft_layer.0": 1},
        kv_caches=jax.device_put([np.zeros(2), np.zeros(3)], NamedSharding(mesh, PartitionSpec())),
    )
    one = DraftModelProposer(config, runner, lookup)
    one.load_model(None)
    return one


def stepped(one: DraftModelProposer) -> np.ndarray:
    """The drafts of a step that takes in prompts, whose next token the target has chosen."""
    runner = one.runner
    ranks, names = runner.dp_size, ROWS_OF[runner.dp_size]
    split = NamedSharding(one.mesh, PartitionSpec("data"))

    def put(parts: list[list[int]], size: int) -> jax.Array:
        whole = [[*part, *[0] * (size - len(part))] for part in parts]
        return jax.device_put(np.array(whole, np.int32).reshape(-1), split)

    requests = {
        name: SimpleNamespace(prompt_token_ids=text, output_token_ids=[])
        for name, text in TEXTS.items()
    }
    one.begin(names, requests)
    live = [[name for name in names[r * ROWS : (r + 1) * ROWS] if name] for r in range(ranks)]
    texts = [[TEXTS[name] for name in some] for some in live]
    lengths = [[len(text) for text in some] for some in texts]
    ends = [np.cumsum([0, *some, *[0] * (ROWS - len(some))]).tolist() for some in lengths]
    metadata = AttentionMetadata(
        input_positions=put([[i for n in some for i in range(n)] for some in lengths], SIZE),
        block_tables=put([[]] * ranks, ROWS * runner.max_num_blocks_per_req),
        seq_lens=put(lengths, ROWS),
        query_start_loc=put(ends, ROWS + 1),
        request_distribution=put([[0, 0, len(some)] for some in live], 3),
        padded_num_reqs=ranks * ROWS,
    )
    following = put([[after(text[-1]) for text in some] for some in texts], ROWS)
    nothing = put([[]] * ranks, ROWS)
    with jax.set_mesh(one.mesh):
        _, tokens, last, metadata = one.prepare_inputs(
            metadata, put([list(chain(*some)) for some in texts], SIZE), None, following, nothing,
            nothing, nothing, put([[len(some)] for some in live], 1),
        )  # fmt: skip
        runner.kv_caches, drafts = one.propose(runner.kv_caches, tokens, metadata, last, None)
    return np.asarray(drafts)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("lookup", [None, Lookup()])
def test_a_step_compiles_nothing_and_drafts_the_models_tokens(
    ranks: int,
    lookup: Lookup | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = made(ranks, lookup, monkeypatch)
    one.warm_up()
    passes_before = float(one.runner.kv_caches[1][0])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        drafts = stepped(one)
    assert "Finished XLA compilation" not in caplog.text
    for row, name in enumerate(ROWS_OF[ranks]):
        if name is not None:
            first = after(after(TEXTS[name][-1]))
            assert drafts[row].tolist() == [(first + i) % VOCAB for i in range(K)]
    assert one.runner.kv_caches[0].tolist() == [0, 0]  # the target's
    assert one.num_passes is not None
    passes = int(one.num_passes)
    assert float(one.runner.kv_caches[1][0]) - passes_before == passes
    # "b" has no text to look in but its own drafts.
    assert passes == K
