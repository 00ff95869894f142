"""LlamaConfig reads what Hugging Face writes, in both spellings, and the presets are true."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from golden import GOLDEN

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import (
    YarnScaling,
    config_fields,
    config_of,
    parameter_specs,
    read_config,
)
from fly_jax.models.presets import PRESETS, PUBLISHED, preset

LLAMA31 = json.loads((GOLDEN / "llama31" / "config.json").read_text())
LLAMA31_V4 = json.loads((GOLDEN / "llama31" / "config_v4.json").read_text())


def folder_with(folder: Path, config: dict[str, Any], **others: dict[str, Any]) -> Path:
    """A folder with `config.json` and other JSON files by stem."""
    for stem, content in {"config": config, **others}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def test_v4_spelling_is_the_same_model() -> None:
    """Also with the scaling by its oldest name."""
    assert "rope_parameters" in LLAMA31
    assert "rope_parameters" not in LLAMA31_V4
    assert config_of(LLAMA31_V4) == config_of(LLAMA31)
    scaling = dict(LLAMA31_V4["rope_scaling"])
    scaling["type"] = scaling.pop("rope_type")
    old = LLAMA31_V4 | {"rope_scaling": scaling}
    assert config_of(old) == config_of(LLAMA31)


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
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_to_hf_comes_back_in_both_spellings(name: str, spelling: str) -> None:
    written = json.loads(json.dumps(config_fields(PRESETS[name])))
    other = {"rope_parameters": ["rope_theta", "rope_scaling"], "rope_scaling": ["rope_parameters"]}
    for key in other[spelling]:
        del written[key]
    assert config_of(written) == PRESETS[name]


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_missing_field_is_named(tmp_path: Path, field: str) -> None:
    folder = folder_with(tmp_path, {k: v for k, v in LLAMA31.items() if k != field})
    with pytest.raises(FlyJaxError, match=f"{folder / 'config.json'} lacks the field '{field}'"):
        read_config(folder)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "field 'low_freq_factor'"),
        ({"model_type": "gpt2"}, "type 'gpt2'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rotary scaling 'longrope'"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation"),
        ({"num_key_value_heads": 3}, "4 query heads and 3 key/value heads"),
    ],
)
def test_what_is_not_known_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FlyJaxError, match=message):
        config_of(LLAMA31 | change)


def test_a_config_file_that_is_no_json(tmp_path: Path) -> None:
    for content in (b'{"vocab_size": 96,', b'{"a": "\xff"}', b""):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(FlyJaxError, match=r"config\.json is not valid JSON"):
            read_config(tmp_path)


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
