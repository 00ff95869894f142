"""The sampler, beside the stock one, and a draft model's programs in the engine's own classes.

Where vllm-tpu is installed. The draft model is a stand-in without attention: seen here is who takes
in what, on how many ranks, and what is compiled. benchmarks/vllm_engine.py drafts with models.
"""

import importlib.util
import logging
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

if importlib.util.find_spec("tpu_inference") is None:
    pytest.skip(
        "vllm-tpu is not installed: pip install vllm-tpu==0.32.0 (Python 3.12, 11 GB)",
        allow_module_level=True,
    )

from tpu_inference.layers.common.attention_metadata import AttentionMetadata
from tpu_inference.layers.jax.sample.rejection_sampler import RejectionSampler
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

from fly_jax import Exact, Fly, Lookup, Rule, per_row, verify_flat
from fly_jax.integrations.vllm_tpu.draft_model import DraftModelProposer
from fly_jax.integrations.vllm_tpu.row_rules import RowRules
from fly_jax.integrations.vllm_tpu.runner import LoosenedSampler
from fly_jax.integrations.vllm_tpu.startup import decoding_config

VOCAB, LONGEST, ROWS, TOKENS = 11, 6, 8, 40
PROTECTED = np.arange(VOCAB) == 3
RULE = Fly(0.6, 1)
FLY = {"rule": "fly", "entropy_threshold": 0.6, "window_size": 1}
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def batch(seed: int) -> Batch:
    """Counts, drafts, logits and bonus tokens of ragged requests; some draft nothing."""
    chance = np.random.default_rng(seed)
    counts = chance.integers(0, LONGEST + 1, ROWS)
    counts[chance.integers(ROWS)] = 0
    logits = chance.normal(0, 1.5, (TOKENS, VOCAB)).astype(np.float32)
    drafts, is_own = chance.integers(0, VOCAB, TOKENS), chance.random(TOKENS) < 0.75
    drafts[is_own] = logits.argmax(-1)[is_own]
    bonus = chance.integers(0, VOCAB, ROWS)
    return counts.astype(np.int32), drafts.astype(np.int32), logits, bonus.astype(np.int32)


def mesh(ranks: int, shards: int = 2) -> Mesh:
    """Data parallel attention over the first axis; the vocabulary is split over the second."""
    return jax.make_mesh((ranks, shards), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def sampler(ranks: int = 1, **asked: Any) -> LoosenedSampler:
    rows = RowRules(decoding_config(FLY | asked, LONGEST), 2 * ROWS)
    given = {"max_drafted": LONGEST, "protected": PROTECTED}
    return LoosenedSampler(mesh(ranks), rows, **given, memory=None)


def metadata(temperature: float | None) -> TPUSupportedSamplingMetadata:
    if temperature is None:
        return TPUSupportedSamplingMetadata(do_sampling=False)
    return TPUSupportedSamplingMetadata(
        temperature=np.full(ROWS, temperature, np.float32), top_k=np.full(ROWS, 5, np.int32),
        top_p=np.full(ROWS, 0.9, np.float32), do_sampling=True,
    )  # fmt: skip


def called(
    one: Callable[..., Any], inputs: Batch, temperature: float | None = None, seed: int = 0
) -> np.ndarray:
    counts, drafts, logits, bonus = inputs
    key = jax.random.key(seed)
    return np.asarray(one(drafts, counts, None, logits, bonus, metadata(temperature), key))


def test_greedy_requests_are_those_of_the_rule_and_those_that_ask_for_it_exact() -> None:
    """As `verify_flat` decides, which tests/verification holds against an oracle."""
    one = sampler()

    def assert_same(seed: int, rule: Rule) -> None:
        counts, drafts, logits, bonus = inputs = batch(seed)
        given = {"max_drafted": LONGEST, "protected": PROTECTED}
        expected = verify_flat(rule, logits, drafts, counts, bonus, **given)
        assert called(one, inputs).tolist() == expected.tokens.tolist()

    for seed in range(6):
        assert_same(seed, RULE)

    def parameters(name: str) -> Any:
        asked = {"fly_jax": {"rule": "exact"}} if int(name) % 2 else None
        return SimpleNamespace(temperature=0.0, extra_args=asked)

    names = [str(row) for row in range(ROWS)]
    one.begin(names, names, parameters)
    assert_same(1, per_row([RULE, Exact()] * (ROWS // 2), like=[RULE]))


def test_where_nothing_is_rescued_it_is_the_stock_sampler_bit_for_bit() -> None:
    one, stock = sampler(entropy_threshold=1e9), RejectionSampler(mesh(1))
    for seed in range(6):
        inputs = batch(seed)
        inputs[0][-1] = 0  # what pads the tokens belongs to the last request, for the stock sampler
        found, expected = called(one, inputs), called(stock, inputs)
        used = inputs[0].sum()
        assert found[:used].tolist() == expected[:used].tolist()
        assert found[TOKENS:].tolist() == expected[TOKENS:].tolist()


def test_each_rank_of_data_parallel_attention_decides_on_its_requests() -> None:
    halves = [batch(seed) for seed in (1, 2)]
    # One rank after the other, each with its padding: half of the rows of a batch.
    counts, drafts, logits, bonus = (np.concatenate(pair) for pair in zip(*halves, strict=True))
    alone, found = sampler(), called(sampler(2), (counts, drafts, logits, bonus))
    assert found.tolist() == np.concatenate([called(alone, half) for half in halves]).tolist()


def test_sampled_requests_have_the_targets_distribution() -> None:
    one = sampler(entropy_threshold=1e9)
    logits = np.random.default_rng(5).normal(0, 1, VOCAB).astype(np.float32)
    counts, bonus = np.ones(ROWS, np.int32), np.zeros(ROWS, np.int32)
    inputs = counts, np.int32([2] * TOKENS), np.broadcast_to(logits, (TOKENS, VOCAB)), bonus
    found = [called(one, inputs, 0.8, seed)[:ROWS] for seed in range(300)]
    expected = oracle.processed_probs(logits, 0.8, 5, 0.9)
    assert oracle.goodness_of_fit(np.concatenate(found), expected) > 1e-3


# Of the draft model: its vocabulary, K, rows of a rank, longest text, and tokens of a page.
WORDS, K, SLOTS, LIMIT, SIZE = 12, 7, 3, 64, 16
TEXTS = {"a": [1, 2, 3, 4] * 2, "b": [5], "c": [*range(11)]}
ROWS_OF = {1: ["a", "b", None], 2: ["c", None, None, "b", "a", None]}


def after(token: Any) -> Any:
    """The model's next token: texts come round to their beginnings."""
    return (token + 1) % WORDS


def passed(leaves: Any, caches: list[jax.Array], tokens: jax.Array, *_: Any) -> tuple[Any, Any]:
    return [one + 1 for one in caches], jax.nn.one_hot(after(tokens), WORDS)


def made(ranks: int, lookup: Lookup | None, monkeypatch: pytest.MonkeyPatch) -> DraftModelProposer:
    devices = mesh(ranks, 1)
    steps = SimpleNamespace(step_fn_no_options=passed)
    model = SimpleNamespace(model=steps, state=None, state_leaves=[])
    model.compute_logits_fn = lambda leaves, hidden, lora: hidden
    loader = "tpu_inference.models.common.model_loader.get_flax_model"
    monkeypatch.setattr(loader, lambda config, key, mesh: model)
    draft = SimpleNamespace(get_num_layers=lambda parallel: 1)
    draft.hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_model_config=draft, method="draft_model", num_speculative_tokens=K,
            use_gemma4_mtp=lambda: False,
        ),
        cache_config=SimpleNamespace(block_size=SIZE), model_config=SimpleNamespace(seed=0),
        parallel_config=None,
    )  # fmt: skip
    whole = NamedSharding(devices, PartitionSpec())
    runner = SimpleNamespace(
        mesh=devices, max_num_tokens=2 * SIZE, max_num_reqs=ranks * SLOTS, max_model_len=LIMIT,
        max_num_blocks_per_req=LIMIT // SIZE, dp_size=ranks, num_tokens_paddings=[ranks * SIZE],
        attn_num_reqs_paddings=[ranks * SLOTS], layer_name_to_kvcache_index={"draft_layer.0": 1},
        kv_caches=jax.device_put([np.zeros(2), np.zeros(3)], whole),
    )  # fmt: skip
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
    live = [[name for name in names[r * SLOTS : (r + 1) * SLOTS] if name] for r in range(ranks)]
    texts = [[TEXTS[name] for name in some] for some in live]
    lengths = [[len(text) for text in some] for some in texts]
    ends = [np.cumsum([0, *some, *[0] * (SLOTS - len(some))]).tolist() for some in lengths]
    metadata = AttentionMetadata(
        input_positions=put([[i for n in some for i in range(n)] for some in lengths], SIZE),
        block_tables=put([[]] * ranks, SLOTS * runner.max_num_blocks_per_req),
        seq_lens=put(lengths, SLOTS), query_start_loc=put(ends, SLOTS + 1),
        request_distribution=put([[0, 0, len(some)] for some in live], 3),
        padded_num_reqs=ranks * SLOTS,
    )  # fmt: skip
    following = put([[after(text[-1]) for text in some] for some in texts], SLOTS)
    nothing = put([[]] * ranks, SLOTS)
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
    ranks: int, lookup: Lookup | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
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
            assert drafts[row].tolist() == [(first + i) % WORDS for i in range(K)]
    assert one.runner.kv_caches[0].tolist() == [0, 0]  # the target's
    assert one.num_passes is not None
    passes = int(one.num_passes)
    assert float(one.runner.kv_caches[1][0]) - passes_before == passes
    # "b" has no text to look in but its own drafts.
    assert passes == K
