"""What Hugging Face's files say of models and heads; what has more than its family is refused."""

import dataclasses
import functools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import random_pairs as pairs
from gguf_files import write
from golden import FIXTURES, GOLDEN, altered, assert_same
from launch_types import Folders
from refusals import assert_refused
from tiny_pair import VOCAB_SIZE

from fly_jax import Lookup, generate, load_pair
from fly_jax.decoding.config import RoundStatic
from fly_jax.decoding.pair import check_chain
from fly_jax.models import architectures
from fly_jax.models.architectures import YarnScaling, config_fields, config_of, read_config
from fly_jax.models.checkpoints.gguf_file import open_gguf
from fly_jax.models.checkpoints.load import load_llama, open_checkpoint, open_weights
from fly_jax.models.checkpoints.write import convert
from fly_jax.models.presets import PRESETS, PUBLISHED, preset

LLAMA31 = json.loads((GOLDEN / "llama31" / "config.json").read_text())
LLAMA31_V4 = json.loads((GOLDEN / "llama31" / "config_v4.json").read_text())
FIELDS = json.loads((GOLDEN / "llama2" / "config.json").read_text())


def folder_with(folder: Path, config: dict[str, Any], **others: dict[str, Any]) -> Path:
    """A folder with `config.json` and other JSON files by stem."""
    for stem, content in {"config": config, **others}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_fields_that_old_files_lack_or_that_say_nothing() -> None:
    rope = {"rope_theta", "rope_scaling"}
    absent = rope | {"head_dim", "num_key_value_heads", "tie_word_embeddings"}
    config = config_of({key: LLAMA31_V4[key] for key in LLAMA31_V4.keys() - absent})
    assert (config.num_kv_heads, config.head_size) == (4, 8)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)
    assert not config.tied_embeddings
    # Rotary fields without effect.
    plain = config_of(FIELDS)
    whole = {**FIELDS["rope_parameters"], "partial_rotary_factor": 1.0}
    assert config_of({**FIELDS, "rope_parameters": whole}) == plain
    assert config_of({**FIELDS, "rope_scaling": None, "partial_rotary_factor": 1}) == plain


@pytest.mark.parametrize(("of_config", "of_generation", "merged"), [
    (2, [2, 5], (2, 5)), ([2, 5], 7, (2, 5, 7)), (None, [9], (9,)), (2, None, (2,)),
])  # fmt: skip
def test_end_of_text_ids_are_merged(
    tmp_path: Path, of_config: object, of_generation: object, merged: tuple[int, ...]
) -> None:
    config = LLAMA31 | {"eos_token_id": of_config}
    folder = folder_with(tmp_path, config, generation_config={"eos_token_id": of_generation})
    assert read_config(folder).eos_token_ids == merged
    folder = folder_with(tmp_path, config, generation_config={"eos_token_id": [[2]]})
    assert_refused("generation_config.json has eos_token_id=", read_config, folder)


def test_windows_of_the_first_layers_are_all_read() -> None:
    kinds = ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"]
    fields = CONFIG | {"model_type": "qwen3", "num_hidden_layers": 4, "layer_types": kinds}
    found = config_of(fields | {"use_sliding_window": True, "sliding_window": 8})
    assert (found.sliding_window, found.windowed_layers) == (8, (0, 1, 3))
    assert config_of(config_fields(found)) == found


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", sorted(name for name in PRESETS if PRESETS[name].head is None))
def test_to_hf_comes_back_in_both_spellings(name: str, spelling: str) -> None:
    """Models alone: a head is read from three formats and written in none."""
    written = json.loads(json.dumps(config_fields(PRESETS[name])))
    other = {"rope_parameters": ["rope_theta", "rope_scaling"], "rope_scaling": ["rope_parameters"]}
    for key in other[spelling]:
        del written[key]
    assert config_of(written) == PRESETS[name]


ASKED = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"


@pytest.mark.parametrize("field", ASKED.split())
def test_missing_field_is_named(tmp_path: Path, field: str) -> None:
    folder = folder_with(tmp_path, {k: v for k, v in LLAMA31.items() if k != field})
    assert_refused(f"{folder / 'config.json'} lacks the field '{field}'", read_config, folder)


def test_yarn_as_a_qwen_asks_for_it() -> None:
    """The context in the file is the one without it; what is not said is the paper's."""
    asked = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    fields = LLAMA31_V4 | {"max_position_embeddings": 40_960, "rope_scaling": asked}
    config = config_of(fields)
    assert config.max_context == 131_072
    assert config.rope_scaling == YarnScaling(
        factor=4.0, original_context=32_768, attention_factor=pytest.approx(1.1386, abs=1e-4)
    )
    assert config_of(config_fields(config)) == config
    weighed = asked | {"mscale": 1.0, "mscale_all_dim": 0.5, "attn_factor": 2.0}
    scaling = config_of(fields | {"rope_scaling": weighed}).rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(2 * 1.1386 / 1.0693, abs=1e-4)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    specs = architectures.parameter_specs(preset(name)).values()
    assert sum(math.prod(spec.shape) for spec in specs) == PUBLISHED[name]


def test_presets_of_one_family_share_vocabulary_and_ends() -> None:
    newer = [config for name, config in PRESETS.items() if re.match(r"llama-3\.[123]-", name)]
    assert len(newer) == 6
    ends = (128_001, 128_008, 128_009)
    assert {(one.vocab_size, one.eos_token_ids) for one in newer} == {(128_256, ends)}
    assert {one.rope_scaling and one.rope_scaling.factor for one in newer} == {8.0, 32.0}


LLAMA3 = LLAMA31["rope_parameters"]
OLD = {name: value for name, value in FIELDS.items() if name != "rope_parameters"}
TWO_WAYS = {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}}
REFUSED: dict[str, dict[str, Any]] = {
    "field 'low_freq_factor'": LLAMA31 | {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
    "type 'gpt2'": LLAMA31 | {"model_type": "gpt2"},
    "rotary scaling 'longrope'": LLAMA31 | {"rope_parameters": {"rope_type": "longrope"}},
    "biases": LLAMA31 | {"attention_bias": True}, "activation": LLAMA31 | {"hidden_act": "gelu"},
    "num_heads=4 and num_kv_heads=3": LLAMA31 | {"num_key_value_heads": 3},
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "factor=4": OLD | {"rope_scaling": {"factor": 4.0}},
    "full_attention": OLD | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
    "rope_scaling": FIELDS | TWO_WAYS,
    "partial_rotary_factor=0.5": FIELDS | {"partial_rotary_factor": 0.5},
    "short_factor": OLD | {"rope_scaling": {**LLAMA3, "short_factor": [1.0]}},
}
REFUSED |= {f"{named}.*does not understand.*give such": ROPES[named] for named in ROPES}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_known_is_refused(message: str) -> None:
    assert_refused(message, config_of, REFUSED[message])


def test_tensors_beyond_the_family(tmp_path: Path) -> None:
    """Without effect are an unembedding that is tied, and as old checkpoints and GPTQ write them
    rotary tables and biases of zero.
    """
    attention = "model.layers.0.self_attn"
    for name in (f"{attention}.o_proj.bias", f"{attention}.q_norm.weight"):
        folder = altered(GOLDEN / "llama2", tmp_path, {}, {name: np.ones(8, np.float32)})
        told = rf"{name}, which models of type 'llama' do not have"
        assert_refused(told, open_weights, folder)
    model = load_llama(GOLDEN / "llama32")
    assert model.config.tied_embeddings
    more = {
        f"{attention}.rotary_emb.inv_freq": np.full(6, np.nan),
        f"{attention}.o_proj.bias": np.zeros(32, np.float16),
        "lm_head.weight": np.asarray(model.parameters()["embedding"]),
    }
    assert_same(load_llama(altered(GOLDEN / "llama32", tmp_path, {}, more)), model)
    more["lm_head.weight"] = more["lm_head.weight"] * 2  # as a merged adapter has it
    folder = altered(GOLDEN / "llama32", tmp_path, {}, more)
    for unstacked in (False, True):
        loading = functools.partial(load_llama, unstacked=unstacked)
        assert_refused("lm_head.weight other than the embedding", loading, folder)


def test_other_layers_than_the_configuration_has(tmp_path: Path) -> None:
    below = r"model\.layers\.1\..*do not have"
    for layers, told in ((1, below), (9_000, "num_layers=9000; there"), (400_000, "400000")):
        folder = altered(GOLDEN / "llama2", tmp_path, {"num_hidden_layers": layers}, {})
        assert_refused(told, open_weights, folder)


def _header(num_tensors: int, num_values: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + rest + bytes(70)


KEY = struct.pack("<Q", 1) + b"a"
CLAIMS = {
    "a list of numbers": _header(0, 1, KEY + struct.pack("<IIQ", 9, 4, 4_000_000)),
    "a list of texts": _header(0, 1, KEY + struct.pack("<IIQ", 9, 8, 4_000_000)),
    "a list of lists": _header(0, 1, KEY + struct.pack("<IIQ", 9, 9, 4_000_000)),
    "a text": _header(0, 1, KEY + struct.pack("<IQ", 8, 2**63)),
    "a key": _header(0, 1, struct.pack("<Q", 2**64 - 1)), "values": _header(0, 2**62),
    "tensors": _header(2**62, 0),
    "sizes of a tensor": _header(1, 0, KEY + struct.pack("<I", 2**31)),
    "nothing": _header(0, 0)[:12],
}  # fmt: skip


@pytest.mark.parametrize("case", CLAIMS)
def test_a_gguf_file_claims_more_than_it_holds(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the library is asked, which would make what is claimed."""
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: pytest.fail("it was asked"))
    path = tmp_path / "model.gguf"
    path.write_bytes(CLAIMS[case])
    assert_refused("cut off or damaged", open_gguf, path)


def test_a_factor_without_a_type_is_linear_in_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, {}, tokenizer=lambda writer: writer.add_float32("llama.rope.scaling.factor", 4.0))
    assert_refused("rotary scaling 'linear'", open_weights, path)


OFFICIAL = FIXTURES / "eagle3" / "official"
CONFIG = {
    "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "draft_vocab_size": 64,
}  # fmt: skip
NESTED = {
    "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "draft_vocab_size": 64,
    "transformer_layer_config": CONFIG,
}  # fmt: skip
DSPARK = CONFIG | {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 2,
    "block_size": 7, "mask_token_id": 95, "target_layer_ids": [1, 5], "num_target_layers": 9,
    "draft_vocab_size": None, "markov_rank": 8,
}  # fmt: skip
DFLASH = DSPARK | {
    "architectures": ["DFlashDraftModel"], "target_layer_ids": None, "mask_token_id": None,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 5]},
}  # fmt: skip
BLOCK = NESTED | {"speculators_model_type": "dspark", "block_size": 7, "mask_token_id": 95}
NAMED = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}
EAGLES = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}


@pytest.mark.parametrize(("fields", "layers"), [
    (NAMED, (2, 16, 29)), (NESTED, (2, 16, 29)), (DSPARK | {"target_layer_ids": [-1, 5]}, (0, 6)),
    (NAMED | {"eagle_config": EAGLES}, (2, 16, 29)), (DFLASH, (2, 6)), (BLOCK, (2, 16, 29)),
    (NAMED | EAGLES, (1, 15, 28)), (BLOCK | {"aux_hidden_state_layer_ids": [1, 5]}, (1, 5)),
    (NAMED | {"target_layer_ids": [1, 15, 27]}, (2, 16, 28)), (NESTED | EAGLES, (1, 15, 28)),
    (NAMED | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, (2, 16, 29)),
])  # fmt: skip
def test_each_format_names_its_layers(fields: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert config_of(fields).head.layers_of(32) == layers


def test_a_head_may_have_a_window_where_its_layer_is_a_llamas() -> None:
    """As speculators' `train` writes it, if it is not told otherwise."""
    layer = CONFIG | {"layer_types": ["sliding_attention"], "sliding_window": 64}
    assert config_of(NESTED | {"transformer_layer_config": layer}).windowed_layers == (0,)


def test_whether_a_window_is_causal_is_said_by_each_form_in_its_own_way() -> None:
    heads = (config_of(one).head for one in (DFLASH, DFLASH | {"is_causal": False}, DSPARK))
    assert [(one.causal_windows, one.windows_from_block) for one in heads] == [
        (True, False), (False, False), (False, False)
    ]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), [
    (NESTED | {"speculators_version": "1.0"}, "version 1.0"),
    (NESTED | {"speculators_model_type": "mtp"}, '"mtp"'),
    (NESTED | {"speculators_model_type": "dflash"}, "block_size=null"),
    (DSPARK | {"block_size": None}, "block_size=null"),
    (DFLASH | {"block_size": 1}, "at least 2 tokens"),
    (DSPARK | {"mask_token_id": None}, "mask_token_id=null"),
    (DSPARK | {"mask_token_id": 96}, "vocabulary of 96"),
    (DSPARK | {"target_layer_ids": None}, "target_layer_ids=null"),
    (DSPARK | {"markov_head_type": "rnn"}, "markov_head_type"),
    (DFLASH | {"dflash_config": {"projector_type": "domino"}}, "projector_type"),
    *((DFLASH | {name: {"causal": True}}, "causal=") for name in ("dflash_config", "is_causal")),
    (NESTED | {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc"),
    (NAMED | {"num_hidden_layers": 4}, "num_hidden_layers=4"),
    (NAMED | {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config"),
])  # fmt: skip
def test_heads_that_are_not_run_are_refused(fields: dict[str, Any], words: str) -> None:
    assert_refused(words, config_of, fields)


OF = dataclasses.replace(pairs.CONFIG, vocab_size=96, embed_size=32, num_layers=9)


@pytest.mark.parametrize(("head", "target", "words"), [
    *((one, {"embed_size": 64}, "width 32") for one in (NAMED, DFLASH)),
    *((one, {"vocab_size": 97}, "vocabulary of 96") for one in (NAMED, DFLASH)),
    (NAMED, {"num_layers": 2}, "layers 2, 1, -1"), (DFLASH, {"num_layers": 10}, "9 layers"),
    (DFLASH, {"num_layers": 6}, "layers 2, 6"),
])  # fmt: skip
def test_a_head_is_of_one_target(head: dict[str, Any], target: dict[str, int], words: str) -> None:
    assert_refused(words, check_chain, dataclasses.replace(OF, **target), [config_of(head)])


def test_a_head_is_of_the_model_above_it_and_the_last_draft() -> None:
    target, draft, head = dataclasses.replace(OF, embed_size=64), OF, config_of(NAMED)
    check_chain(target, [draft, head])
    assert_refused("the draft model above it has a width of 64", check_chain, draft, [target, head])
    assert_refused("the target has a width of 64", check_chain, target, [head])
    assert_refused("last --draft", check_chain, draft, [head, draft])
    given = target, [draft, head], RoundStatic(3, Lookup())
    assert_refused("prompt_lookup_max", check_chain, *given)
    fewer = dataclasses.replace(draft, draft_vocab_size=40)
    assert_refused("which has not all tokens", check_chain, target, [fewer, head])


@pytest.mark.parametrize(("changed", "words"), [
    ({"d2t": -np.arange(64)}, "a token twice"), ({"d2t": np.zeros(60, np.int64)}, r"shape \[60\]"),
    ({"d2t": np.full(64, 40, np.int64)}, "beyond the vocabulary"),
    ({"midlayer.self_attn.q_proj.bias": np.ones(32, np.float32)}, "q_proj.bias"),
    ({"norm.weight": None}, "lacks the tensor norm.weight"),
])  # fmt: skip
def test_wrong_tensors_are_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert_refused(words, load_llama, altered(OFFICIAL, tmp_path, {}, changed))


def test_a_head_is_neither_a_target_nor_converted(tmp_path: Path) -> None:
    assert_refused("give it as --draft", open_checkpoint, OFFICIAL)
    assert_refused("not converted", convert, OFFICIAL, tmp_path)


EAGLE = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}}
DFLASH_OF_TWO = {"dflash_config": {"mask_token_id": 94, "target_layer_ids": [-1, 0, 0]}}


@pytest.mark.parametrize(("name", "fields", "dtype", "above"), [
    ("eagle3/official", EAGLE, "float32", 0), ("eagle3/official", EAGLE, "float32", 1),
    ("block/dflash", DFLASH_OF_TWO, "int8", 0),
])  # fmt: skip
def test_a_head_is_recognised_by_itself(
    name: str, fields: dict[str, Any], dtype: Any, above: int, tiny_pair: Folders, tmp_path: Path
) -> None:
    """And has the target's tables, as far as it lacks them, and its tokenizer."""
    target = tiny_pair[0]
    fields = {"vocab_size": VOCAB_SIZE, "num_target_layers": 2} | fields
    head = altered(FIXTURES / name, tmp_path / "head", fields, {"t2d": None})
    pair = load_pair(target, [*[target] * above, head], dtype=dtype)
    (found,) = generate(pair, ["Ada has 3"], rule="exact", num_speculative_tokens=4)
    (plain,) = generate(pair, ["Ada has 3"], rule="autoregressive")
    assert found.token_ids == plain.token_ids
    drafted, passes = found.num_draft_passes / found.num_rounds, 4 if fields.keys() & EAGLE else 1
    assert drafted <= passes if above else drafted == passes
