"""Fields that other servers know and this one does not: which matter, and which do not."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_NOTHING: tuple[Any, ...] = (0, "", [], {})
# Fields of OpenAI, vLLM, SGLang and llama.cpp that change the text or add to the reply, with the
# values that do not.
_CHANGING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "suffix"),
            *("min_p", "top_a", "tfs_z", "mirostat", "dry_multiplier", "xtc_probability"),
            *("max_completion_tokens", "max_new_tokens", "n_predict", "top_logprobs"),
            *("min_tokens", "stop_token_ids", "allowed_token_ids", "include_stop_str_in_output"),
            *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
            *("structured_outputs", "json_schema", "regex", "ebnf", "grammar"),
            *("tools", "tool_calls", "functions", "function_call", "audio", "web_search_options"),
            *("chat_template", "chat_template_kwargs", "continue_final_message", "documents"),
            *("echo", "prompt_logprobs", "return_tokens_as_token_ids", "logits_processors"),
            *("use_beam_search", "truncate_prompt_tokens", "prompt_embeds", "lora_path"),
        ),
        _NOTHING,
    ),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p", "best_of"), (1,)),
    **dict.fromkeys(("skip_special_tokens", "add_special_tokens", "add_generation_prompt"), (1,)),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# So much like a field that there is, one was meant to be that.
_ALIKE = 0.9


def check_others(others: Mapping[str, Any], known: Collection[str]) -> None:
    """Passes over fields that are not known and change nothing.

    Args:
      others: the fields, with their values.
      known: names of the fields that there are.

    Raises:
      ValueError: one would change the answer, or is a known one misspelt.
    """
    for name, value in others.items():
        changes = name in _CHANGING and value is not None and value not in _CHANGING[name]
        if changes:
            raise ValueError(f"{name} is {value!r}, which is not done here; leave it out")
        meant = difflib.get_close_matches(name, known, 1, _ALIKE)
        if meant:
            raise ValueError(f"there is no field {name!r}; write {meant[0]!r}, or leave it out")
