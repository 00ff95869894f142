"""Tokenizers of checkpoint folders: text to token ids and back, streaming included.

Both kinds of vocabulary, `tokenizer.json` and SentencePiece's `.model`, answer with the bytes of
each token: joined and decoded once, they are text however characters are cut.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
import tokenizers

from fly_jax.errors import FlyJaxError
from fly_jax.models.architectures import LlamaConfig, ends_of_text, read_json

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# Halves of surrogate pairs, which no text has. Put inside a mark that a message spells out, they
# keep it from being a mark. The first is taken out again; at the second the text is cut.
_WITHIN, _CUT = "\ud800", "\ud801"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    Text is what the tokens' bytes spell, joined and decoded as UTF-8 with U+FFFD for what is not
    UTF-8. So streamed text, coloured pieces and `decode` agree to the character.
    """

    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]  # that end a text, by the tokenizer and the configuration
    # Every token that is no text (begin, padding, headers, …), sorted: never rescued, nor decoded.
    control_token_ids: tuple[int, ...]
    chat_template: str | None  # the Jinja template of a conversation, if any
    special_tokens: Mapping[str, str]  # that a template may name, such as `{"bos_token": "<s>"}`

    @property
    def digest(self) -> str:
        """SHA-256 of what the ids mean; control tokens count by their place, not by their name."""
        controls = set(self.control_token_ids)
        names = ["" if at in controls else name for at, name in enumerate(self.vocabulary.names)]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """The text's tokens, after the begin of text if the model's makers put one there.

        A control token spelt out in the text, such as "</s>", is text like any other: only a chat
        template makes control tokens, so that no prompt can end its own turn.
        """
        return self.vocabulary.encode(text, adds_special=add_bos)

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, *, continues: bool = False
    ) -> str:
        """The tokens' text; control tokens are left out unless asked for.

        A text that `continues` goes on behind another one, so that a first space is its own: many
        tokenizers put one before a text, and take it away again.
        """
        stream = TextStream(self, skip_special_tokens, continues=continues)
        return stream.push(ids) + stream.finish()

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, within a text; U+FFFD for a part of a character."""
        return self.vocabulary.token_bytes(token_id, False).decode("utf-8", "replace")

    def matching(self, patterns: Sequence[str]) -> tuple[int, ...]:
        """The ids of tokens whose text has one of the patterns; raises as `re` does."""
        compiled = [re.compile(pattern) for pattern in patterns]
        ids = range(len(self.vocabulary.names) if compiled else 0)
        return tuple(at for at in ids if any(one.search(self.token_text(at)) for one in compiled))

    def piece_texts(self, ids: Iterable[int], skip_special_tokens: bool = False) -> list[str]:
        """The text of each token; a split character belongs to the token that completes it."""
        stream = TextStream(self, skip_special_tokens)
        texts = [stream.push([token_id]) for token_id in ids]
        if texts:
            texts[-1] += stream.finish()
        return texts

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the assistant begins to speak.

        They are transformers', but for tokens that are spelt out in a message, so that no message
        can end its own turn. Control tokens are text there, and so is whatever else the tokenizer's
        file adds to the vocabulary. Only messages of the assistant keep those additions (such as
        "<think>"), which templates look for. Such a conversation is encoded part by part between
        its own controls, where SentencePiece may put another space, as it may within an addition.
        Marks of a template that are no tokens, as "[INST]" of Llama 2, are text for all.

        Messages are such as `{"role": "user", "content": "Hello"}`, in order. FlyJaxError where the
        tokenizer has no chat template, or the template refuses them.
        """
        if self.chat_template is None:
            raise FlyJaxError(
                "This tokenizer has no chat template, so it cannot take a conversation; give a "
                "plain prompt, or the checkpoint of an instruct model."
            )
        vocabulary, controls = self.vocabulary, self.vocabulary.controls
        if "developer" not in self.chat_template:  # OpenAI's newer word; templates drop such roles
            new = {"role": "system"}
            messages = [{**m, **new} if m.get("role") == "developer" else m for m in messages]
        said = "".join(value for message in messages for value in message.values())
        # Single characters and spaces are text, whatever a file calls them.
        ours, added = (
            [name for name in names if len(name.strip()) > 1 and name in said]
            for names in (controls, vocabulary.added)
        )
        hidden = []
        for message in messages:
            marks = () if message.get("role") == "assistant" else added
            hidden.append({key: _hidden(value, ours, marks) for key, value in message.items()})
        text = _render(self.chat_template, self.special_tokens, hidden)
        if not (_WITHIN in text or _CUT in text):
            return vocabulary.encode(text, parse_controls=True)
        ids: list[int] = []
        parts = _split(text, controls)
        for index, part in enumerate(parts):
            if index % 2:
                ids.append(controls[part].id)
                continue
            if index and controls[parts[index - 1]].rstrip:
                part = part.lstrip()
            if index + 1 < len(parts) and controls[parts[index + 1]].lstrip:
                part = part.rstrip()
            for piece in part.replace(_WITHIN, "").split(_CUT):
                ids += vocabulary.encode(piece)
        return ids


class TextStream:
    """A stream of tokens' text; part of a character is kept back until its last byte is there."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False
    ) -> None:
        """Begins where a text begins, or behind one; see `Tokenizer.decode`."""
        self._vocabulary = tokenizer.vocabulary
        self._skipped = frozenset(tokenizer.control_token_ids if skip_special_tokens else ())
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        data = bytearray()
        for token_id in ids:
            if token_id in self._skipped:
                continue
            data += self._vocabulary.token_bytes(token_id, self._first)
            self._first = False
        return self._decoder.decode(bytes(data))

    def finish(self) -> str:
        """The rest at the end: U+FFFD for a character that never became complete."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(folder: Path, config: LlamaConfig | None = None) -> Tokenizer:
    """Reads a checkpoint folder's tokenizer.

    `tokenizer.json` is preferred to `tokenizer.model`; `tokenizer_config.json`, `config.json` and
    `generation_config.json` add what they say about the ends of texts, if they are there.
    FlyJaxError for no tokenizer in the folder, or a file that cannot be read.
    """
    path = folder / "tokenizer_config.json"
    both = (folder / "special_tokens_map.json", path)  # older files name them in the first alone
    settings = {key: value for one in both if one.exists() for key, value in read_json(one).items()}
    extra = settings.get("extra_special_tokens")
    settings |= extra if isinstance(extra, Mapping) else {}
    special = {
        key: value if isinstance(value, str) else str(value.get("content"))
        for key, value in settings.items()
        if key.endswith("_token") and isinstance(value, str | Mapping)
    }
    adds_bos, bos = settings.get("add_bos_token", True), special.get("bos_token")
    cuts = bool(settings.get("cuts_at_added"))  # of what was a GGUF file
    vocabulary = _load_vocabulary(folder, adds_bos=adds_bos, bos=bos, cuts_at_added=cuts)
    ids = {name: index for index, name in enumerate(vocabulary.names) if name}
    listed, older = settings.get("added_tokens_decoder"), folder / "added_tokens.json"
    decoded = list(listed.values()) if isinstance(listed, Mapping) else []
    decoded = [one for one in decoded if isinstance(one, Mapping)]
    names = [str(one.get("content")) for one in decoded]
    marked = [str(one.get("content")) for one in decoded if one.get("special")]
    for added in (*names, *(read_json(older) if older.exists() else ())):
        is_padding = added in ("<pad>", "[PAD]", special.get("pad_token"))  # which is never fed
        if added not in ids and not is_padding:
            raise FlyJaxError(
                f"{path if added in names else older} adds the token '{added}', which the "
                "vocabulary beside it lacks; fly_jax "
                "takes added tokens from tokenizer.json: write one with transformers' "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)."
            )
    told = ends_of_text(folder) if config is None else config.eos_token_ids
    ends = (ids.get(special.get("eos_token", "")), *told)
    eos_ids = tuple(dict.fromkeys(one for one in ends if one is not None))
    named = {ids[name] for name in (*special.values(), *marked) if name in ids}
    controls = tuple(sorted(vocabulary.control_ids | named | set(eos_ids)))
    return Tokenizer(vocabulary, eos_ids, controls, _chat_template(folder, settings), special)


def check_unicode(text: str, name: str) -> str:
    """Returns a text; FlyJaxError for bytes of a command line, or half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        said = f"{name} holds a character that is not valid Unicode; give it as UTF-8."
        raise FlyJaxError(said) from error
    return text


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises FlyJaxError, which names sizes or the first id, unless ids mean the same to both."""
    names, others = target.vocabulary.names, draft.vocabulary.names
    advice = "speculative decoding needs one vocabulary: choose a draft of the target's family."
    if len(names) != len(others):
        sizes = f"{len(names)} tokens and the draft's {len(others)}"
        raise FlyJaxError(f"The target's tokenizer has {sizes}; {advice}")
    # These may have other names: Llama 3.1 renamed some that Llama 3 had reserved.
    controls = set(target.control_token_ids) & set(draft.control_token_ids)
    for index, (name, other) in enumerate(zip(names, others, strict=True)):
        if name != other and index not in controls:
            raise FlyJaxError(
                f"Token {index} is {name!r} to the target and {other!r} to the draft; {advice}"
            )


def _load_vocabulary(folder: Path, **given: Any) -> Vocabulary:
    """The vocabulary of a `tokenizer.json`, which says itself what is added, or of a `.model`."""
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return JsonVocabulary(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise FlyJaxError(
                f"{path} is not a tokenizer that the tokenizers library can read ({error}); "
                "download the file again."
            ) from error
    models = [folder / "tokenizer.model", *sorted(folder.glob("*.model"))]
    for path in models:
        if path.exists():
            return _sentence_piece_vocabulary(path, **given)
    raise FlyJaxError(
        f"{folder} has neither tokenizer.json nor tokenizer.model; a checkpoint folder needs one: "
        "copy it from the model's repository."
    )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The default template: a file of its own, or among the settings, alone or by name."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FlyJaxError(
                f"{path} cannot be read ({error}); download the file again."
            ) from error
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise FlyJaxError(
            f"{folder / 'tokenizer_config.json'} has a chat_template that is neither a text nor a "
            "list of named ones; download the file again."
        )
    return template


def _render(
    template: str, special_tokens: Mapping[str, str], messages: Sequence[Mapping[str, str]]
) -> str:
    # transformers takes seconds to import and, without PyTorch, says so on standard error.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import jinja2
    from transformers import PreTrainedTokenizerFast

    # Templates run in transformers' sandbox, with its helpers, over a tokenizer without tokens.
    renderer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
        chat_template=template,
        **special_tokens,
    )
    said = [dict(message) for message in messages]
    try:
        return str(renderer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program, and fails as it likes
        reason = " ".join(str(error).replace(_WITHIN, "").replace(_CUT, "").split())
        if type(error) is jinja2.TemplateError:  # what its raise_exception raises
            raise FlyJaxError(
                f"The chat template refuses these messages ({reason}); give an alternation of user "
                "and assistant messages that ends with the user's."
            ) from error
        raise FlyJaxError(
            f"The chat template fails ({type(error).__name__}: {reason.rstrip('.')}); download the "
            "model's tokenizer files again."
        ) from error


def _hidden(text: str, controls: Iterable[str], added: Iterable[str]) -> str:
    """The text, with `within` inserted in each of these names that it spells out."""
    for names, within in ((added, _CUT), (controls, _WITHIN)):
        for name in names:
            while name in text:  # again where it overlaps itself
                text = text.replace(name, f"{name[0]}{within}{name[1:]}")
    return text


def _split(text: str, names: Iterable[str]) -> list[str]:
    """Cuts the text where it spells out one of the names; these are every second part."""
    found = sorted((name for name in names if name and name in text), key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]


class Control(NamedTuple):
    """A control token, and whether the spaces before it and behind it go with it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class JsonVocabulary:
    """The tokens of a `tokenizer.json`, by the tokenizers library (transformers starts slowly).

    Attributes:
      names: every token as the file spells it, by id; '' for an id without a token.
      control_ids: tokens that are no text.
      controls: those that are parsed, by their spelling.
      added: the spelling of others that are one token wherever they stand.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Takes the library's tokenizer, whose post-processor says what is put around a prompt."""
        tokenizer.no_truncation()  # which a file may ask for
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(index for index, one in added.items() if one.special)
        self.controls = {
            added[index].content: Control(index, added[index].lstrip, added[index].rstrip)
            for index in self.control_ids
        }
        self.added = tuple(one.content for one in added.values() if not one.special)
        self._added = frozenset(added)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        spelt = {index: name for name, index in ids.items()}
        self.names = tuple(spelt.get(index, "") for index in range(max(spelt, default=-1) + 1))
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        self._byte_fallback = "ByteFallback" in repr(self._tokenizer.decoder)
        self.token_bytes = functools.lru_cache(maxsize=None)(self._token_bytes)

    def encode(
        self, text: str, *, parse_controls: bool = False, adds_special: bool = False
    ) -> list[int]:
        """The tokens of a text; `adds_special` adds what its makers put around a prompt.

        With `parse_controls` control tokens that are spelt out become one token each. FlyJaxError
        for half of a pair of surrogates.
        """
        check_unicode(text, "A text")
        with self._lock:  # the choice is the library object's, which threads share
            self._tokenizer.encode_special_tokens = not parse_controls
            # As a batch: for a single text the library keeps all other threads waiting.
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
            return list(batch[0].ids)

    def _token_bytes(self, token_id: int, first: bool) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._byte_level and token_id not in self._added:
            table = _byte_of_character()
            if all(character in table for character in name):
                return bytes(table[character] for character in name)
            return name.encode()  # as the library does with what is spelt out
        byte = _BYTE_PIECE.fullmatch(name) if self._byte_fallback else None
        if byte is not None and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])
        if first:
            return self._decode([token_id]).encode()
        # Decoders strip a space from the start of a text: put something there.
        return self._decode([self._letter, token_id])[1:].encode()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def _letter(self) -> int:
        """A token whose text is one letter."""
        for letter in "aeinorst":
            index = self._tokenizer.token_to_id(letter)
            if index is not None and self._decode([index]) == letter:
                return index
        raise FlyJaxError(
            "The tokenizer has no token for a single letter, so the text of its tokens cannot be "
            "told apart; give a tokenizer that is byte-level or SentencePiece's."
        )


class SentencePieceVocabulary:
    """The tokens of a SentencePiece model, as `JsonVocabulary` has those of its file."""

    def __init__(
        self, model: sentencepiece.SentencePieceProcessor, bos_token_id: int | None,
        added: Sequence[str] = (), *, cuts_at_added: bool = False,
    ) -> None:  # fmt: skip
        """Takes the library's model, the token that begins a prompt, if any, and added pieces."""
        self._model, self._bos = model, bos_token_id
        self.names = tuple(model.id_to_piece(index) for index in range(model.get_piece_size()))
        kinds, ids = (model.is_control, model.is_unknown, model.is_unused), range(len(self.names))
        self.control_ids = frozenset(at for at in ids if any(is_one(at) for is_one in kinds))
        self.controls = {self.names[index]: Control(index) for index in sorted(self.control_ids)}
        self.added = tuple(name.replace(_SPACE, " ") for name in added)
        # To llama.cpp what follows such a piece begins a text, with a space; not to the library.
        marks = [one for one in self.added if cuts_at_added and len(one.strip()) > 1]
        self._marks = {name: Control(model.piece_to_id(name)) for name in marks}
        # Most models put a space in front of a text, and so strip one from its start.
        spaced = (at for at, name in enumerate(self.names) if re.match("\u2581[^\u2581]", name))
        one = next((index for index in spaced if index not in self.control_ids), None)
        self._strips_space = one is not None and not model.decode([one]).startswith(" ")

    def encode(
        self, text: str, *, parse_controls: bool = False, adds_special: bool = False
    ) -> list[int]:
        """The tokens of a text."""
        ids = [self._bos] if adds_special and self._bos is not None else []
        known = self._marks | (self.controls if parse_controls else {})
        for index, part in enumerate(_split(text, known)):
            ids += [known[part].id] if index % 2 else self._model.encode(part)
        return ids

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """The UTF-8 of one token, as it stands at the start of a text or within it."""
        if not 0 <= token_id < len(self.names):
            return b""
        piece = self.names[token_id]
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        if first and self._strips_space:
            piece = piece.removeprefix(_SPACE)
        return piece.replace(_SPACE, " ").encode()


Vocabulary = JsonVocabulary | SentencePieceVocabulary


def _sentence_piece_vocabulary(
    path: Path, *, adds_bos: bool, bos: str | None, cuts_at_added: bool
) -> SentencePieceVocabulary:
    """The vocabulary of a `.model`; `bos` is the piece that begins a prompt, None its own."""
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError) as error:
        raise FlyJaxError(
            f"{path} is not a SentencePiece model ({error}); download the file again."
        ) from error
    begin = model.bos_id()
    if bos is not None and model.piece_to_id(bos) != model.unk_id():
        begin = model.piece_to_id(bos)
    added = _user_defined(model.serialized_model_proto())
    first = begin if adds_bos and begin >= 0 else None
    return SentencePieceVocabulary(model, first, added, cuts_at_added=cuts_at_added)


def _user_defined(model: bytes) -> list[str]:
    """The pieces that a serialised model calls user-defined.

    They are read here, since the library's own reader refuses a protobuf older than itself. Field 1
    of a model is a piece: its text is field 1, and field 3, at its end, is 4 for such a one.
    """

    def read(data: bytes, at: int) -> tuple[int, bytes, int]:
        tag, size, shift = data[at], 0, 0
        while True:
            at += 1
            size, shift = size | (data[at] & 0x7F) << shift, shift + 7
            if data[at] < 0x80:
                return tag, data[at + 1 : at + 1 + size], at + 1 + size

    found, at = list[str](), 0
    while at < len(model):
        tag, part, at = read(model, at)
        if tag == 0x0A and part.endswith(b"\x18\x04"):
            found.append(read(part, 0)[1].decode(errors="replace"))
    return found


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The bytes behind GPT-2's 256 printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    characters: dict[str, int] = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(rest)}
