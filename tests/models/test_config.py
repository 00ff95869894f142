"""LlamaConfig reads what Hugging Face writes; what has more than its family is refused."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import write
from golden import GOLDEN, altered, assert_same
from refusals import assert_refused

from fly_jax.models.architectures import config_fields, config_of, parameter_specs, read_config
from fly_jax.models.checkpoints.gguf_file import open_gguf
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.presets import PRESETS, PUBLISHED, preset
from fly_jax.models.rope_scaling import YarnScaling

LLAMA31 = json.loads((GOLDEN / "llama31" / "config.json").read_text())
LLAMA31_V4 = json.loads((GOLDEN / "llama31" / "config_v4.json").read_text())
FIELDS = json.loads((GOLDEN / "llama2" / "config.json").read_text())


def folder_with(folder: Path, config: dict[str, Any], **others: dict[str, Any]) -> Path:
    """A folder with `config.json` and other JSON files by stem."""
    for stem, content in {"config": config, **others}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_fields_that_old_files_lack() -> None:
    rope = {"rope_theta", "rope_scaling"}
    absent = rope | {"head_dim", "num_key_value_heads", "tie_word_embeddings"}
    config = config_of({key: LLAMA31_V4[key] for key in LLAMA31_V4.keys() - absent})
    assert (config.num_kv_heads, config.head_size) == (4, 8)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)
    assert not config.tied_embeddings


@pytest.mark.parametrize(
    ("of_config", "of_generation", "merged"),
    [(2, [2, 5], (2, 5)), ([2, 5], 7, (2, 5, 7)), (None, [9], (9,)), (2, None, (2,))],
)
def test_end_of_text_ids_are_merged(
    tmp_path: Path, of_config: object, of_generation: object, merged: tuple[int, ...]
) -> None:
    config = LLAMA31 | {"eos_token_id": of_config}
    folder = folder_with(tmp_path, config, generation_config={"eos_token_id": of_generation})
    assert read_config(folder).eos_token_ids == merged


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
    weighed = asked | {"mscale": 1.0, "mscale_all_dim": 0.5}
    scaling = config_of(fields | {"rope_scaling": weighed}).rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(1.1386 / 1.0693, abs=1e-4)


def test_a_config_file_that_is_no_json(tmp_path: Path) -> None:
    for content in (b'{"vocab_size": 96,', b'{"a": "\xff"}', b""):
        (tmp_path / "config.json").write_bytes(content)
        assert_refused(r"config\.json is not valid JSON", read_config, tmp_path)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    specs = parameter_specs(preset(name)).values()
    assert sum(math.prod(spec.shape) for spec in specs) == PUBLISHED[name]


def test_presets_of_one_family_share_vocabulary_and_ends() -> None:
    newer = [config for name, config in PRESETS.items() if re.match(r"llama-3\.[123]-", name)]
    assert len(newer) == 6
    ends = (128_001, 128_008, 128_009)
    assert {(one.vocab_size, one.eos_token_ids) for one in newer} == {(128_256, ends)}
    factors = {one.rope_scaling and one.rope_scaling.factor for one in newer}
    assert factors == {8.0, 32.0}


LLAMA3 = LLAMA31["rope_parameters"]
OLD = {name: value for name, value in FIELDS.items() if name != "rope_parameters"}
TWO_WAYS = {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}}
REFUSED: dict[str, dict[str, Any]] = {
    "field 'low_freq_factor'": LLAMA31 | {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
    "type 'gpt2'": LLAMA31 | {"model_type": "gpt2"},
    "rotary scaling 'longrope'": LLAMA31 | {"rope_parameters": {"rope_type": "longrope"}},
    "biases": LLAMA31 | {"attention_bias": True},
    "activation": LLAMA31 | {"hidden_act": "gelu"},
    "num_heads=4 and num_kv_heads=3": LLAMA31 | {"num_key_value_heads": 3},
}
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


def test_rotary_fields_without_effect() -> None:
    plain = config_of(FIELDS)
    whole = {**FIELDS["rope_parameters"], "partial_rotary_factor": 1.0}
    assert config_of({**FIELDS, "rope_parameters": whole}) == plain
    assert config_of({**FIELDS, "rope_scaling": None, "partial_rotary_factor": 1}) == plain


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
    "a key": _header(0, 1, struct.pack("<Q", 2**64 - 1)),
    "values": _header(0, 2**62),
    "tensors": _header(2**62, 0),
    "sizes of a tensor": _header(1, 0, KEY + struct.pack("<I", 2**31)),
    "nothing": _header(0, 0)[:12],
}


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
