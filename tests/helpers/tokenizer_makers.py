"""Small tokenizers, as their makers make them."""

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["the quick brown fox", "he said: there are 42 heads", "  the end\n", "fox heads the"] * 5
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
CONTROLS = ["<unk>", "<s>", "</s>", "<|eot|>"]
BEGIN = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('Who is this?') }}"
    "{% endif %}{{ message.role }}: {{ message.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


LLAMA2 = {"vocab_size": 330, "control_symbols": ["<|eot|>"]}


def write_sentencepiece(path: Path, texts: Iterable[str] = WORDS, **settings: Any) -> None:
    """A model with byte fallback; where no settings are given, one like Llama 2's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        **(settings or LLAMA2),
    )  # fmt: skip
    path.write_bytes(model.getvalue())


def llama2_json() -> tokenizers.Tokenizer:
    """The same kind as tokenizers keeps it, with a vocabulary made by hand."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    pieces = [*CONTROLS, *byte_pieces, *"▁abcdefghinorstuwx:", *(a + b for a, b in merges)]
    ids = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(marks)
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in CONTROLS])
    tokenizer.post_processor = BEGIN
    return tokenizer


def fill(folder: Path, kind: str, **settings: Any) -> Path:
    """A tokenizer folder of that kind."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "sentencepiece":
        write_sentencepiece(folder / "tokenizer.model")
    else:
        make = {"llama2": llama2_json, "llama3": llama3_json, "marked": marked_json}[kind]
        make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


# Texts of what tokenizers treat differently: digits, spaces, contractions, accents, scripts.
HARD = [
    "I have 1234567 apples.", "  two  spaces\n\n\ttab ", "don't DON'T we'll", "e\u0301 caf\u00e9",
    "\u65e5\u672c\u8a9e \U0001f642\U0001f469\u200d\U0001f680", "x = y[3:-1]  # why?\r\n", "", " ",
]  # fmt: skip


def byte_level(
    *steps: pre_tokenizers.PreTokenizer, normalizer: Any = None, post_processor: Any = None
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer as its makers cut text, trained on a little of it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer, tokenizer.post_processor = normalizer, post_processor
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=CONTROLS, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([*WORDS, *HARD] * 3, trainer)
    return tokenizer


def llama3_json() -> tokenizers.Tokenizer:
    """A byte-level one."""
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), post_processor=BEGIN)


MARKS = ("<|user|>", "<|assistant|>", "<think>", "</think>")
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "<|assistant|>{{ message.content.split('</think>')[-1] }}<|eot|>"
    "{% elif message.role == 'user' %}<|user|> {{ message.content }} <|end|>"
    "{% else %}{{ raise_exception('No ' + message.role) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def marked_json() -> tokenizers.Tokenizer:
    """One of turns that begin with tokens that are not special; a letter is added, as in some."""
    made = llama3_json()
    made.add_tokens([AddedToken(one, normalized=False) for one in (*MARKS, "€")])
    made.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True, normalized=False)])
    return made


def taking_whole_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same where a word that is a token is taken as it is, and one that no merges lead to."""
    changed = json.loads(tokenizer.to_str())
    model, word = changed["model"], "\u0120apples"
    assert word in model["vocab"]
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) != word]
    model["ignore_merges"] = True
    return tokenizers.Tokenizer.from_str(json.dumps(changed))


def split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def mistral_json() -> tokenizers.Tokenizer:
    """As that of Mistral 7B v0.3: a space is put before a text's first word, and never after."""
    tokenizer = llama2_json()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    controls = ("[INST]", "[/INST]", "[TOOL_CALLS]")
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in controls])
    return tokenizer


QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (  # which tells capitals from small letters
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OFFSETS = processors.ByteLevel(trim_offsets=False)
LLAMA3_END = processors.Sequence([OFFSETS, BEGIN])
LLAMA3 = split(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"))
DIGITS = pre_tokenizers.Digits(individual_digits=True)
MAKERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "Llama 2": llama2_json,
    "Llama 3": lambda: taking_whole_tokens(byte_level(*LLAMA3, post_processor=LLAMA3_END)),
    "SmolLM2": lambda: byte_level(DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Qwen 2.5 and 3": lambda: byte_level(
        *split(QWEN), normalizer=normalizers.NFC(), post_processor=OFFSETS
    ),
    "Mistral 7B v0.3": mistral_json,
    "Mistral since Nemo": lambda: taking_whole_tokens(
        byte_level(*split(TEKKEN), post_processor=BEGIN)
    ),
}
