"""Arrays of the shapes that most signatures name; each name in a shape is one size in a call."""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Array, Bool, Float, Float32, Int, Key

Index: TypeAlias = Int[Array, ""]
RowInts: TypeAlias = Int[Array, " rows"]
RowFloats: TypeAlias = Float32[Array, " rows"]
RowFlags: TypeAlias = Bool[Array, " rows"]
RowKeys: TypeAlias = Key[Array, " rows"]
# Tokens: the rows' texts, with room behind them; those of one pass; those of a draft.
Text: TypeAlias = Int[Array, "rows capacity"]
Tokens: TypeAlias = Int[Array, "rows time"]
DraftTokens: TypeAlias = Int[Array, "rows draft"]
DraftFlags: TypeAlias = Bool[Array, "rows draft"]
DraftFloats: TypeAlias = Float32[Array, "rows draft"]
# Results of a pass: last states, inputs of some layers side by side, the scores of all tokens.
Hidden: TypeAlias = Float[Array, "rows time embed"]
Features: TypeAlias = Float[Array, "rows time features"]
Inputs: TypeAlias = Float[Array, "rows time inputs"]
Logits: TypeAlias = Float[Array, "rows time vocab"]
