"""What is checked before the engine starts, while a wrong setting is still one sentence."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.integrations.vllm_tpu.settings import (
    KEY,
    asked_for,
    decoding_config,
    request_rule,
)
from fly_jax.models.checkpoints.locate import resolve
from fly_jax.models.tokenizers.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer

TRIED = {"vllm-tpu": ("0.32.0",), "tpu-inference": ("0.32.0",)}
# The engine has a Llama, but no Mistral, in JAX; without a sliding window they are one.
DRAFTS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_WORKER = "fly_jax.integrations.vllm_tpu.worker.Worker"
_LOGGER = logging.getLogger("vllm.fly_jax")  # which vLLM shows
# What this process has prepared last; requests are checked against it.
_prepared: list[DecodingConfig] = []


class StartRefusedError(RuntimeError):
    """Why the engine does not start: the sentence of a `FlyJaxError`.

    That one is a `ValueError`, and vLLM's configs are pydantic's, which would put the sentence into
    a report of its own.
    """


def refuse(error: FlyJaxError) -> NoReturn:
    """Ends the start: vLLM's command with the sentence and status 2, another program by raising.

    Raises:
      StartRefusedError: with the sentence, where a program makes the engine.
      SystemExit: in `vllm serve` and the like.
    """
    command = Path(sys.argv[0])
    if command.name == "vllm" or command.parts[-4:-1] == ("vllm", "entrypoints", "cli"):
        print(f"vllm: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    raise StartRefusedError(str(error)) from None


def prepare(vllm_config: Any) -> None:
    """Checks what was asked for, and has the engine make the worker that does it.

    Raises:
      FlyJaxError: versions that were never tried, no speculative decoding, a rule of which nothing
        can be made with this K, a draft model that the engine or the target cannot use, or a lookup
        without one.
    """
    asked = asked_for(vllm_config.additional_config.get(KEY), os.environ)
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise FlyJaxError(
            f"fly_jax was asked for (additional_config[{KEY!r}] or FLY_JAX_RULE) without "
            "speculative decoding, where there is nothing to rescue; give speculative_config, such "
            'as {"method": "ngram", "num_speculative_tokens": 10}, or leave fly_jax out.'
        )
    asked = {"rule": "exact"} if asked is None else asked
    if not asked.get("any_version"):
        _check_versions()
    config = decoding_config(asked, speculative.num_speculative_tokens)
    if speculative.method == "draft_model":
        _check_draft(vllm_config)
    elif config.to_lookup() is not None:
        raise FlyJaxError(
            f"additional_config[{KEY!r}] has prompt_lookup_max={config.prompt_lookup_max}, for a "
            f"lookup below a draft model, and the method is {speculative.method}; give the method "
            "draft_model, or leave it out (the method ngram has its own in speculative_config)."
        )
    vllm_config.additional_config[KEY] = asked  # what a worker in another process reads
    vllm_config.parallel_config.worker_cls = _WORKER
    _prepared[:] = [config]
    if config.is_loosened:
        _LOGGER.info("fly_jax: the rule %s keeps tokens that the target refuses", config.rule)


def check_request(params: Any) -> None:
    """Checks `extra_args["fly_jax"]` of a request.

    Where this process has not made the engine's config, the worker checks it.

    Raises:
      FlyJaxError: see `request_rule`.
    """
    if _prepared:
        request_rule(_prepared[0], params.extra_args[KEY], params.temperature)


def target_tokenizer(model_config: Any) -> Tokenizer:
    """That of the engine's target, read as fly_jax reads it."""
    revision = model_config.tokenizer_revision or model_config.revision
    name = model_config.tokenizer
    return load_tokenizer(resolve(name, None if os.path.isdir(name) else revision))


def _check_versions() -> None:
    for package, tried in TRIED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # built from source under another name
            found = "of no known version"
        if found not in tried:
            raise FlyJaxError(
                f"{package} is {found}, and fly_jax was tried with {', '.join(tried)}; install "
                f'that, or try this one with "any_version": true in additional_config[{KEY!r}] '
                "(FLY_JAX_ANY_VERSION=true)."
            )


def _check_draft(vllm_config: Any) -> None:
    draft = vllm_config.speculative_config.draft_model_config
    (name,) = draft.hf_config.architectures
    if name not in DRAFTS or (
        name == "MistralForCausalLM" and draft.hf_config.sliding_window is not None
    ):
        raise FlyJaxError(
            f"The draft model {draft.model} is a {name}, with which the engine cannot draft on "
            f"TPU; give one of {', '.join(DRAFTS)}, without a sliding window."
        )
    if name == "Qwen2ForCausalLM" and not draft.hf_config.tie_word_embeddings:
        raise FlyJaxError(
            f"The draft model {draft.model} is a Qwen 2 with an unembedding of its own, which the "
            "engine's loader cannot load in JAX; give one with tied embeddings, or a Qwen 3."
        )
    target = vllm_config.model_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1 or target.use_mla:
        raise FlyJaxError(
            "A draft model was asked for with pipeline parallelism or a target with latent "
            "attention, whose cache has no place for it; choose another method."
        )
    if draft.model != target.model:
        mine = load_tokenizer(resolve(draft.model, draft.revision))
        check_same_vocabulary(target_tokenizer(target), mine)
