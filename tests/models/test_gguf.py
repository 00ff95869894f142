"""GGUF files: each type of weights, the families, the tokenizer, and what is refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf_files import CONFIG, Put, byte_level_writer, sentence_piece_writer, tensors_of, write
from golden import GOLDEN, assert_same, layout_on
from refusals import assert_refused
from tokenizer_makers import HARD, MAKERS, llama3_json

from fly_jax.models.attention import inverse_frequencies
from fly_jax.models.checkpoints import load
from fly_jax.models.checkpoints.gguf_file import TYPES, open_gguf
from fly_jax.models.checkpoints.load import load_llama, open_checkpoint, open_weights
from fly_jax.models.checkpoints.write import convert
from fly_jax.models.llama import Llama
from fly_jax.models.presets import PRESETS
from fly_jax.models.tokenizer import load_tokenizer

Tensors = dict[str, np.ndarray]
Make = Callable[[Path], tuple[int, Put]]
Sized = Callable[[int, Put], Path]


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama.random(CONFIG, jax.random.key(1))


@pytest.fixture(scope="module")
def tensors(model: Llama) -> Tensors:
    return tensors_of(model)


@pytest.fixture
def sized(tmp_path: Path, tensors: Tensors) -> Sized:
    """Writes a file with a tokenizer, and embeddings for so many tokens."""
    return lambda size, put: gguf_files.write_sized(tmp_path / "model.gguf", tensors, size, put)


def test_weights_come_back_on_a_mesh(tmp_path: Path, model: Llama, tensors: Tensors) -> None:
    path = write(tmp_path / "model.gguf", tensors)
    assert_same(load_llama(path, layout=layout_on("2x2")), model)


@pytest.mark.parametrize("kind", TYPES[1:])
def test_every_type_is_read(tmp_path: Path, tensors: Tensors, kind: str) -> None:
    path = write(tmp_path / "model.gguf", tensors, kind)
    stored = GGMLQuantizationType[kind]
    # What the library's blocks say, taken through a file that holds it in float32.
    blocks = {k: gguf_files.quantised(v, stored) for k, v in tensors.items() if v.ndim == 2}
    plain = tensors | {name: gguf.dequantize(value, stored) for name, value in blocks.items()}
    assert_same(load_llama(path), load_llama(write(tmp_path / "plain.gguf", plain)))
    if kind == "Q8_0":
        widened, up = (some["blk.0.ffn_up.weight"] for some in (plain, tensors))
        np.testing.assert_allclose(widened, up, atol=np.abs(up).max() / 127)
        again = load_llama(path, int8=True)
        assert again.has_integers
        assert again.parameters()["gate"].dtype == jnp.int8


@pytest.mark.parametrize("endianess", gguf.GGUFEndian)
def test_the_header_is_what_the_library_reads(
    tmp_path: Path, tensors: Tensors, endianess: gguf.GGUFEndian
) -> None:
    def put(writer: gguf.GGUFWriter) -> None:
        writer.endianess = endianess
        writer.add_array("of.texts", ["a", "", "déjà", "🙂" * 40])
        writer.add_array("of.numbers", [1, -2, 3])
        writer.add_array("of.truths", [True, False])
        writer.add_float64("a.number", 0.1)
        writer.add_int8("a.small", -3)
        writer.add_custom_alignment(64)

    path = write(tmp_path / "model.gguf", tensors, tokenizer=put)
    found, reader = open_gguf(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items()}
    assert found.values == {key: expected[key] for key in expected if key[:5] != "GGUF."}
    assert list(found.tensors) == [one.name for one in reader.tensors]
    for one in reader.tensors:
        mine = found.tensors[one.name]
        assert (mine.kind, mine.begin) == (one.tensor_type, one.data_offset)
        np.testing.assert_array_equal(found.rows(one.name, slice(None)), one.data)


def test_what_tensors_say_of_the_configuration(tmp_path: Path, tensors: Tensors) -> None:
    """Llama 3.1 states its frequencies as factors, and the output may be the embedding."""
    scaled = dataclasses.replace(CONFIG, rope_scaling=PRESETS["llama-3.2-1b"].rope_scaling)
    factors = (inverse_frequencies(CONFIG) / inverse_frequencies(scaled)).astype(np.float32)
    path = write(tmp_path / "model.gguf", tensors | {"rope_freqs.weight": factors})
    assert open_weights(path).config == scaled
    write(path, tensors | {"rope_freqs.weight": factors**2})
    assert_refused(r"other factors than Llama 3\.1 and 3\.2", open_weights, path)
    tied = {name: tensor for name, tensor in tensors.items() if name != "output.weight"}
    assert open_weights(write(path, tied)).config.tied_embeddings


TEXTS = ["the quick  brown fox", " he said: 42\n", "", "déjà vu 🙂", "</s> spelt out"]


def byte_level(_: Path) -> tuple[int, Put]:
    made = llama3_json()
    return made.get_vocab_size(), byte_level_writer(made, "gpt-2", adds_bos=True)


def test_a_byte_level_tokenizer_gives_the_ids_of_its_json(tmp_path: Path, sized: Sized) -> None:
    found = open_checkpoint(sized(*byte_level(tmp_path))).tokenizer
    assert found.eos_token_ids == (2, 3)
    reference = llama3_json()
    reference.encode_special_tokens = True
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == [1, *reference.encode(text, add_special_tokens=False).ids]
        assert found.decode(ids) == text
    assert found.apply_chat_template([{"role": "user", "content": "fox"}])[-1] == 3


CUTS = {
    "llama-bpe": "Llama 3",
    "smaug-bpe": "Llama 3",  # SmolLM3's, which puts nothing before a text
    "smollm": "SmolLM2", "qwen2": "Qwen 2.5 and 3", "deepseek-r1-qwen": "Qwen 2.5 and 3",
    "tekken": "Mistral since Nemo",
}  # fmt: skip


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_its_makers_cut_it(sized: Sized, pre: str) -> None:
    """What puts a begin of text before it is known by the name of the cut where nothing says so."""
    made = MAKERS[CUTS[pre]]()
    put = byte_level_writer(made, pre, adds_bos=None)
    found = open_checkpoint(sized(made.get_vocab_size(), put)).tokenizer
    for text in HARD:
        assert found.encode(text) == made.encode(text, add_special_tokens=pre != "smaug-bpe").ids


DAMAGE: dict[str, tuple[object, str]] = {
    "merges": (["a b c"], "is damaged"), "token_type": ([1, 1], "is damaged"),
    "padding_token_id": (9999, "9999"), "pre": ("viking", "pre-tokenizer 'viking'"),
}  # fmt: skip


@pytest.mark.parametrize("key", DAMAGE)
def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, sized: Sized, key: str) -> None:
    value, words = DAMAGE[key]
    size, whole = byte_level(tmp_path)

    def put(writer: gguf.GGUFWriter) -> None:
        whole(writer)
        writer.add_pad_token_id(0)
        name, fields = f"tokenizer.ggml.{key}", writer.kv_data[0]
        fields[name] = dataclasses.replace(fields[name], value=value)

    assert_refused(words, open_checkpoint, sized(size, put))


def test_a_sentencepiece_tokenizer_gives_the_ids_of_its_model(tmp_path: Path, sized: Sized) -> None:
    found = open_checkpoint(sized(*sentence_piece_writer(tmp_path))).tokenizer
    expected = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text
    assert found.encode("the")[0] == 1


def test_a_message_has_no_pieces_that_are_user_defined(tmp_path: Path, sized: Sized) -> None:
    """Nor in the checkpoint that the file is converted to."""
    size, whole = sentence_piece_writer(tmp_path)

    def put(writer: gguf.GGUFWriter) -> None:
        whole(writer)
        (fields,) = writer.kv_data
        names, kinds = (fields[f"tokenizer.ggml.{one}"].value for one in ("tokens", "token_type"))
        names[-1], kinds[-1] = "<|user|>", gguf.TokenType.USER_DEFINED
        writer.add_chat_template("<|user|>{{ messages[0].content }}")

    convert(sized(size, put), tmp_path / "converted", "float32")
    for path in (tmp_path / "model.gguf", tmp_path / "converted"):
        found = open_checkpoint(path).tokenizer
        assert found.encode("x<|user|>")[-1] == size - 1
        assert found.decode(found.encode("x<|user|>")) == "x<|user|>"
        assert found.encode("<|user|>the") == [1, size - 1, *found.encode("the", add_bos=False)]
        for content in ("x", "x<|user|>", "<|user|><|user|>"):
            ids = found.apply_chat_template([{"role": "user", "content": content}])
            assert ids.count(size - 1) == 1


def test_a_sentencepiece_file_that_names_no_begin_and_no_end(tmp_path: Path, sized: Sized) -> None:
    """A mark of turns ends them whatever its kind; the first piece with a space may have two."""
    size, whole = sentence_piece_writer(tmp_path)

    def put(writer: gguf.GGUFWriter) -> None:
        whole(writer)
        (fields,) = writer.kv_data
        names, kinds = (fields[f"tokenizer.ggml.{one}"].value for one in ("tokens", "token_type"))
        names[-1], kinds[-1] = "<|im_end|>", gguf.TokenType.USER_DEFINED
        names[next(at for at, name in enumerate(names) if name[0] == "\u2581")] = "\u2581\u2581"
        del fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]

    found = open_checkpoint(sized(size, put)).tokenizer
    assert found.eos_token_ids == (2, size - 1)
    assert found.encode("the")[0] == 1
    assert found.decode(found.encode("the fox")) == "the fox"


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, tensors: Tensors) -> None:
    path = write(tmp_path / "model.gguf", tensors)
    whole = path.read_bytes()
    newer = whole[:4] + (99).to_bytes(4, "little") + whole[8:]
    halves = (whole[: len(whole) // 2], "cut off"), (whole[:100], "cut off")
    offsets = (whole.index(b"blk.%d.ffn_up.weight" % layer) + 19 + 24 for layer in range(2))
    first, second = (slice(at, at + 8) for at in offsets)
    overlap = whole[: second.start] + whole[first] + whole[second.stop :]
    at = whole.index(b"blk.0.ffn_up.weight") + 19 + 20
    unknown = whole[:at] + (77).to_bytes(4, "little") + whole[at + 4 :]
    halves += ((overlap, "damaged"), (unknown, "stored as type 77; fly_jax reads"))
    others = (newer, "of version 99, and the installed"), (b"no such thing", "no GGUF file")
    for data, words in (*halves, *others):
        path.write_bytes(data)
        assert_refused(words, open_gguf, path)
    assert_refused("cannot be read", open_gguf, tmp_path / "missing.gguf")
    fewer = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}
    narrow = tensors | {"blk.0.attn_k.weight": tensors["blk.0.attn_k.weight"][:64]}
    biased = tensors | {"blk.0.attn_q.bias": np.zeros(256, np.float32)}
    deeper = tensors | {"blk.9.ffn_up.weight": tensors["blk.0.ffn_up.weight"]}
    for some, kind, family, words in (
        (tensors, "F32", "gemma", "architecture 'gemma'"),
        (fewer, "F32", "llama", r"lacks the tensor blk\.1\.ffn_up\.weight"),
        (narrow, "F32", "llama", r"has shape \[64, 256\]"),
        (biased, "F32", "llama", r"blk\.0\.attn_q\.bias, which .* 'llama'"),
        (deeper, "F32", "llama", r"blk\.9\.ffn_up\.weight, which"),
        (tensors, "IQ4_NL", "llama", "stored as IQ4_NL"),
    ):
        assert_refused(words, open_weights, write(path, some, kind, architecture=family))

    def turn(writer: gguf.GGUFWriter) -> None:
        writer.endianess = gguf.GGUFEndian.BIG

    assert_refused("little-endian", open_gguf, write(path, tensors, "Q8_0", tokenizer=turn))


@pytest.mark.parametrize("make", [byte_level, sentence_piece_writer])
def test_a_conversion_carries_the_tokenizer(
    tmp_path: Path, sized: Sized, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sized(*make(tmp_path))
    opened: list[Path] = []
    with monkeypatch.context() as patch:
        patch.setattr(load, "open_gguf", lambda one: opened.append(one) or open_gguf(one))
        convert(path, tmp_path / "converted", "float32")
    assert opened == [path]
    found, expected = (open_checkpoint(one) for one in (tmp_path / "converted", path))
    assert found.config == expected.config
    for text in TEXTS:
        assert found.tokenizer.encode(text) == expected.tokenizer.encode(text)
    assert found.tokenizer.chat_template == expected.tokenizer.chat_template
    assert found.tokenizer.special_tokens == expected.tokenizer.special_tokens
    assert_same(load_llama(tmp_path / "converted"), load_llama(path))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm3"])
def test_families(tmp_path: Path, family: str) -> None:
    """No two biases or norms of these models are the same."""
    model = load_llama(GOLDEN / family)
    # The layers without positions are not in the file; llama.cpp, too, takes every fourth.
    unrotated = tuple(range(3, model.config.num_layers, 4)) if family == "smollm3" else ()
    config = dataclasses.replace(model.config, unrotated_layers=unrotated)
    path = write(tmp_path / "model.gguf", tensors_of(model), config=config, architecture=family)
    found = load_llama(path)
    assert dataclasses.replace(found.config, max_context=config.max_context) == config
    assert_same(Llama(model.config, found.parameters()), model)


def test_padding_is_no_token_and_ends_are_known_by_their_text_too(sized: Sized) -> None:
    """A file names one end of each kind, and a Qwen has two."""
    made = MAKERS["Qwen 2.5 and 3"]()
    size, renamed = made.get_vocab_size(), {"<unk>": "<|endoftext|>"}
    assert made.token_to_id("<unk>") == 0
    put = byte_level_writer(made, "qwen2", adds_bos=False, padding=3, renamed=renamed)
    opened = open_checkpoint(sized(size + 3, put))
    assert len(opened.tokenizer.vocabulary.names) == size
    assert opened.config.vocab_size == size + 3
    assert set(opened.config.eos_token_ids) == {0, 2, 3}


@pytest.mark.parametrize(("window", "family"), [(8, "mistral"), (0, "llama")])
def test_a_window_makes_a_llama_a_mistral(
    tmp_path: Path, model: Llama, tensors: Tensors, window: int, family: str
) -> None:
    def put(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(window)
        gguf_files.ends(writer)

    found = load_llama(write(tmp_path / "model.gguf", tensors, tokenizer=put))
    assert (found.config.architecture, found.config.sliding_window) == (family, window or None)
    assert_same(Llama(model.config, found.parameters()), model)
