"""Two kinds of vocabulary behind one interface: `tokenizer.json` and SentencePiece `.model`.

Both answer with the bytes of each token, because one character may be spread over several tokens:
joined bytes, decoded once, are text whatever the cut.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers

from fly_jax.errors import FlyJaxError

_SPACE = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary(Protocol):
    """The tokens of a model, without what only its other files tell (ends of text).

    Attributes:
      names: every token as the file spells it, by id; '' for an id without a token.
      control_ids: tokens that are no text.
    """

    names: tuple[str, ...]
    control_ids: frozenset[int]

    def encode(
        self, text: str, *, parse_controls: bool = False, adds_special: bool = False
    ) -> list[int]:
        """The tokens of a text.

        Args:
          text: what to encode.
          parse_controls: control tokens that are spelt out become one token each.
          adds_special: adds what the model's makers put around a prompt, such as a begin of text.
        """
        ...

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """UTF-8 of one token, as it stands at the start of a text or within it."""
        ...


class JsonVocabulary:
    """A tokenizer of the tokenizers library alone (transformers starts slowly)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Takes the library's tokenizer, whose post-processor says what is put around a prompt."""
        tokenizer.no_truncation()  # which a file may ask for
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = frozenset(added)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        spelt = {index: name for name, index in ids.items()}
        self.names = tuple(spelt.get(index, "") for index in range(max(spelt, default=-1) + 1))
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        self._byte_fallback = "ByteFallback" in repr(self._tokenizer.decoder)
        self._token_bytes = functools.lru_cache(maxsize=None)(self._read_token_bytes)

    def encode(
        self, text: str, *, parse_controls: bool = False, adds_special: bool = False
    ) -> list[int]:
        """See `Vocabulary`."""
        with self._lock:  # the choice is the library object's, which threads share
            self._tokenizer.encode_special_tokens = not parse_controls
            return self._tokenizer.encode(text, add_special_tokens=adds_special).ids

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """See `Vocabulary`."""
        return self._token_bytes(token_id, first)

    def _read_token_bytes(self, token_id: int, first: bool) -> bytes:
        name = self._tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._byte_level and token_id not in self._added:
            return bytes(_byte_of_character()[character] for character in name)
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
    """A SentencePiece model."""

    def __init__(
        self, model: sentencepiece.SentencePieceProcessor, bos_token_id: int | None
    ) -> None:
        """Takes the library's model, and the token that begins a prompt, if any."""
        self._model, self._bos = model, bos_token_id
        self.names = tuple(model.id_to_piece(index) for index in range(model.get_piece_size()))
        self.control_ids = frozenset(
            index
            for index in range(len(self.names))
            if model.is_control(index) or model.is_unknown(index) or model.is_unused(index)
        )
        self._controls = {self.names[index]: index for index in sorted(self.control_ids)}
        # Most models put a space in front of a text, and so strip one from its start.
        spaced = [index for index, name in enumerate(self.names) if name.startswith(_SPACE)]
        self._strips_space = bool(spaced) and not model.decode(spaced[:1]).startswith(" ")

    def encode(
        self, text: str, *, parse_controls: bool = False, adds_special: bool = False
    ) -> list[int]:
        """See `Vocabulary`."""
        parts = self._split(text) if parse_controls else iter([text])
        ids = [index for part in parts for index in self._encode_part(part)]
        return [self._bos, *ids] if adds_special and self._bos is not None else ids

    def token_bytes(self, token_id: int, first: bool) -> bytes:
        """See `Vocabulary`."""
        if not 0 <= token_id < len(self.names):
            return b""
        piece = self.names[token_id]
        if self._model.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        if first and self._strips_space:
            piece = piece.removeprefix(_SPACE)
        return piece.replace(_SPACE, " ").encode()

    def _split(self, text: str) -> Iterator[str | int]:
        pattern = "|".join(map(re.escape, self._controls))
        for part in re.split(f"({pattern})", text):
            if part:
                yield self._controls.get(part, part)

    def _encode_part(self, part: str | int) -> list[int]:
        return [part] if isinstance(part, int) else self._model.encode(part)


def read_json(path: Path) -> JsonVocabulary:
    """A `tokenizer.json`.

    Raises:
      FlyJaxError: the tokenizers library cannot read it.
    """
    try:
        return JsonVocabulary(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception
        raise FlyJaxError(
            f"{path} is not a tokenizer that the tokenizers library can read ({error}); "
            "download the file again."
        ) from error


def read_model(path: Path, *, adds_bos: bool, bos: str | None) -> SentencePieceVocabulary:
    """A SentencePiece `.model`.

    Args:
      path: the file.
      adds_bos: a begin of text is put before a prompt.
      bos: its piece; None for the model's own.

    Raises:
      FlyJaxError: the sentencepiece library cannot read it.
    """
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError, ValueError) as error:
        raise FlyJaxError(
            f"{path} is not a SentencePiece model ({error}); download the file again."
        ) from error
    begin = model.bos_id()
    if bos is not None and model.piece_to_id(bos) != model.unk_id():
        begin = model.piece_to_id(bos)
    return SentencePieceVocabulary(model, begin if adds_bos and begin >= 0 else None)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    characters: dict[str, int] = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(rest)}
