"""The embedded pair's tokenizer: a SentencePiece BPE, also written for transformers.

Text comes back from its tokens exactly, white space included: nothing is normalised, no space is
put in front, and a newline is a token of its own. (The one exception is SentencePiece's own mark
for a space, U+2581, which comes back as a space.) Digits are tokens of their own too, so that a
number is spelt rather than remembered.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import library_text
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from word_problems import problems

UNKNOWN, BEGIN, END, PAD, NEWLINE = "<unk>", "<s>", "</s>", "<pad>", "\n"

_SPACE = "\u2581"
_CORPUS_CHARACTERS = 4_000_000
_PROBLEM_SHARE = 0.6


def _take(texts: Iterable[str], characters: float) -> Iterator[str]:
    """The first of `texts`, until they hold `characters`."""
    lengths = 0
    for text in texts:
        if lengths >= characters:
            return
        lengths += len(text)
        yield text


def training_texts(seed: int, characters: int = _CORPUS_CHARACTERS) -> Iterator[str]:
    """Texts that the tokenizer is trained on: problems and library text of the training split."""
    worded = (problem.prompt + problem.solution for problem in problems(seed, "train"))
    library = library_text.documents("train")
    # Evenly spaced chunks, because the first ones are all of the same few modules.
    stride = max(1, int(sum(map(len, library)) / (characters * (1 - _PROBLEM_SHARE))))
    return itertools.chain(
        _take(worded, characters * _PROBLEM_SHARE),
        _take(library[::stride], characters * (1 - _PROBLEM_SHARE)),
    )


def _train_sentencepiece(texts: Iterator[str], vocab_size: int) -> bytes:
    """The serialised SentencePiece model of `texts`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts,
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        split_digits=True,
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=100_000,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        unk_piece=UNKNOWN,
        bos_piece=BEGIN,
        eos_piece=END,
        pad_piece=PAD,
        # Otherwise pieces would reach across the ends of lines.
        user_defined_symbols=[NEWLINE],
        minloglevel=2,
    )
    return model.getvalue()


def _merges(pieces: list[str]) -> list[tuple[str, str]]:
    """Every way to merge two pieces into a third, in the order in which SentencePiece does.

    It prefers the piece that was learnt first, which is the order of the pieces themselves.
    """
    rank = {piece: index for index, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += sorted(
            ((left, right) for left, right in cuts if left in rank and right in rank),
            key=lambda pair: (rank[pair[0]], rank[pair[1]]),
        )
    return merges


def _as_tokenizers(model: sentencepiece.SentencePieceProcessor) -> Tokenizer:
    """The same tokenizer in the form that transformers reads."""
    pieces = [model.id_to_piece(index) for index in range(model.get_piece_size())]
    plain = [
        piece
        for index, piece in enumerate(pieces)
        if not (model.is_control(index) or model.is_byte(index) or model.is_unknown(index))
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=_merges([piece for piece in plain if piece != NEWLINE]),
            unk_token=UNKNOWN,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, model.bos_id())],
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(mark, normalized=False, special=True) for mark in (UNKNOWN, BEGIN, END, PAD)]
    )
    tokenizer.add_tokens([AddedToken(NEWLINE, normalized=False, special=False)])
    return tokenizer


def train_tokenizer(output_directory: Path, vocab_size: int = 2048, seed: int = 0) -> None:
    """Writes `tokenizer.model`, `tokenizer.json` and `tokenizer_config.json`."""
    serialised = _train_sentencepiece(training_texts(seed), vocab_size)
    model = sentencepiece.SentencePieceProcessor(model_proto=serialised)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        # "<s>" within a text is text, as it is to SentencePiece: regular expressions have it.
        "split_special_tokens": True,
    }
    output_directory.mkdir(parents=True, exist_ok=True)
    (output_directory / "tokenizer.model").write_bytes(serialised)
    _as_tokenizers(model).save(str(output_directory / "tokenizer.json"))
    (output_directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
