"""vLLM for TPU with the plugin, on a CPU: vLLM's engine beside fly_jax's own.

    pip install vllm-tpu==0.32.0 && pip install -e .
    python benchmarks/vllm_engine.py

The embedded pair, 32 prompts of different lengths and limits, 8 at a time, greedily, in float32.
Each way of decoding is a process of its own. What the engine lacks without a TPU is stood in for by
`vllm_stand_ins.py`; so this counts tokens, and says nothing of speed.

- Exact decoding must give plain decoding's tokens, and so must a request that asks for it.
- A lookup below the draft model changes how many passes a step of it takes, and no token.
- FLy must give the tokens of fly_jax's engine with the same rule, K and drafts, which begins
  behind vLLM's first token: vLLM's first block of drafts begins there.

Then the same of the engine's own heads, `--only=heads` alone: random ones of tiny random targets of
12 tokens, so that chance agrees often enough. And 8 random prompts with tiny random models of other
families, whose drafts have the targets' weights: every token that they draft must be accepted, and
all tokens must be plain decoding's, with a lookup below the draft model and with two ranks that
share the requests too. Writes results/vllm_engine.json, vllm_heads.json and vllm_families.json.
`--trained=TARGET,HEAD,PROMPTS` runs a trained EAGLE-3 head alone, on some of a file of prompts, as
chats; the target is written for the engine in float32. Writes results/vllm_trained_head.json.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import vllm_stand_ins
from absl import flags
from machine import run, write
from safetensors.numpy import save_file
from texts import documents, library_beginnings, word_problems

from fly_jax.decoding.config import DecodingConfig
from fly_jax.decoding.pair import Pair, load_pair
from fly_jax.decoding.state import RoundOutput
from fly_jax.engine.engine import Engine
from fly_jax.engine.request import Request
from fly_jax.launch.inputs import read_prompts
from fly_jax.models.architectures import LlamaConfig
from fly_jax.models.checkpoints.load import load_llama, open_weights
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR
from fly_jax.models.checkpoints.write import carry_tokenizer, save_hf
from fly_jax.models.llama import Llama, Parameters
from fly_jax.models.tokenizer import load_tokenizer

_ONLY = flags.DEFINE_enum("only", None, ["pair", "heads", "families"], "one part of it")
_TRAINED = flags.DEFINE_list("trained", None, "a target, its trained head, and a file of prompts")

_REQUESTS, _ROWS, _K = 32, 8, 15
_TARGET, _DRAFT = map(str, EMBEDDED_PAIR)
_LOOKUP = {
    "method": "ngram", "num_speculative_tokens": 10,
    "prompt_lookup_min": 1, "prompt_lookup_max": 4,
}  # fmt: skip
_MODEL = {"method": "draft_model", "model": _DRAFT, "num_speculative_tokens": _K}
_FLY = {"rule": "fly", "entropy_threshold": 0.3, "window_size": 6}
_EXACT = {"rule": "exact"}
_BELOW = {"prompt_lookup_max": 4}
_BUDGET = {"rule": "fly | margin", "risk_budget": 1.0}
_Requests = list[dict[str, Any]]


class _Way(NamedTuple):
    """How the engine decodes.

    Attributes:
      speculative: speculative_config.
      fly_jax: of additional_config.
      other: arguments of the engine.
      some_exact: every fourth request asks for the rule exact.
    """

    speculative: dict[str, Any] | None = None
    fly_jax: dict[str, Any] | None = None
    other: dict[str, Any] = {}  # noqa: RUF012 - is not written to
    some_exact: bool = False


_WAYS = {
    "plain": _Way(),
    "lookup, exact": _Way(_LOOKUP, _EXACT),
    "lookup, fly": _Way(_LOOKUP, _FLY),
    "draft model, exact": _Way(_MODEL, _EXACT, {"async_scheduling": False}),
    "draft model, fly": _Way(_MODEL, _FLY, {"async_scheduling": False}),
    "draft model, fly, scheduled ahead": _Way(_MODEL, _FLY, {"async_scheduling": True}),
    "draft model, fly, cached beginnings": _Way(_MODEL, _FLY, {"enable_prefix_caching": True}),
    "draft model, fly, some exact": _Way(_MODEL, _FLY, some_exact=True),
    "draft model, exact, lookup below": _Way(_MODEL, _EXACT | _BELOW),
    "draft model, fly, lookup below": _Way(_MODEL, _FLY | _BELOW),
    "draft model, budget": _Way(_MODEL, _FLY | _BUDGET),
}

# The engine's own heads, with family and layers of the target. For EAGLE-3 only its Llama has
# features, and with fewer layers two of the three that are read would be one, which it gives once.
_HEADS = {"eagle3": ("llama3", 8), "dflash": ("qwen3", 6)}
_HEAD_REQUESTS, _HEAD_K, _WORDS = 16, 5, 12

_GOLDEN = Path(__file__).parents[1] / "tests" / "fixtures" / "golden"
_FAMILIES = ("qwen3", "mistral")  # the embedded pair is a Llama
_VOCAB = 96
_HEAD_SIZE = 128  # the engine knows no smaller ones of a Qwen 3
# additional_config["fly_jax"], and the ranks of data parallel attention.
_FAMILY_WAYS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "plain": (None, 1),
    "draft model": (_EXACT, 1),
    "draft model, lookup below, two ranks": (_EXACT | _BELOW, 2),
}


def _requests(pair: Pair) -> _Requests:
    """A third word problems, a third beginnings of files, and as many long ones."""
    third, chance = -(-_REQUESTS // 3), random.Random(0)
    texts = (pair.tokenizer.encode(text) for text in documents("held_out"))
    long = [ids[: chance.randint(80, 300)] for ids in texts if len(ids) > 500][:third]
    prompts = [
        *(pair.tokenizer.encode(one.prompt) for one in word_problems("held_out", third)),
        *library_beginnings(pair, "held_out", third),
        *long,
    ]
    chance.shuffle(prompts)
    limits = (8, 24, 48, 96, 128)
    return [{"prompt": ids, "limit": chance.choice(limits)} for ids in prompts[:_REQUESTS]]


def _decoded(target: str, way: _Way, requests: _Requests, **given: Any) -> dict[str, Any]:
    asked = [
        one | ({"extra_args": {"fly_jax": _EXACT}} if way.some_exact and not index % 4 else {})
        for index, one in enumerate(requests)
    ]
    arguments = {"enable_prefix_caching": False, "speculative_config": way.speculative}
    arguments |= given | way.other
    return vllm_stand_ins.decoded(target, asked, fly_jax=way.fly_jax, **arguments)


def _own(pair: Pair, way: _Way, requests: _Requests, plain: list[list[int]]) -> dict[str, Any]:
    """The same by fly_jax's engine: tokens, drafts and accepted draft tokens."""
    speculative = way.speculative
    assert speculative is not None
    most = speculative["num_speculative_tokens"]
    values = dict(way.fly_jax or {}, num_speculative_tokens=most, lossless_speculative_tokens=most)
    if speculative["method"] == "ngram":
        values |= {name: one for name, one in _LOOKUP.items() if name.startswith("prompt_lookup")}
        values["prompt_lookup_match"] = "earliest"
    found: dict[str, Any] = {"tokens": [one[:1] for one in plain], "drafts": 0}

    def count(output: RoundOutput, _: object) -> None:
        found["drafts"] += int((output.num_drafted > 0).sum())

    # The engine's first token is no draft's; after a limit of one there is nothing to decode.
    prompts = [one["prompt"] + first for one, first in zip(requests, found["tokens"], strict=True)]
    limits = [one["limit"] - 1 for one in requests]
    engine = Engine.of(
        pair, DecodingConfig(**values), prompts=prompts, max_new_tokens=max(limits),
        num_slots=_ROWS, listener=count,
    )  # fmt: skip
    asked = {
        row: engine.submit(Request(prompt, limit))
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        if limit and prompt[-1] not in pair.tokenizer.eos_token_ids
    }
    list(engine.run(()))
    own = {row: one.generation for row, one in asked.items()}
    for row, one in own.items():
        found["tokens"][row] += one.token_ids
    found["accepted"] = sum(one.num_accepted_tokens for one in own.values())
    found["rescued"] = sum(one.num_rescued_tokens for one in own.values())
    return found


def _compared(
    way: _Way, one: dict[str, Any], plain: list[list[int]], pair: Pair | None, requests: _Requests
) -> dict[str, Any]:
    """How many requests have the tokens that they must have."""
    result: dict[str, Any] = {
        "tokens": sum(map(len, one["tokens"])),
        "as_plain": sum(a == b for a, b in zip(one["tokens"], plain, strict=True)),
    }
    if pair is None:
        return result
    own = _own(pair, way, requests, plain)
    wanted = list(own["tokens"])
    if way.some_exact:
        wanted[::4] = plain[::4]
    metrics = one["metrics"]
    result |= {
        "as_fly_jax": sum(a == b for a, b in zip(one["tokens"], wanted, strict=True)),
        "rescued_tokens": metrics.get("rescued_tokens", 0),
        "mean_acceptance_length": 1 + metrics["accepted_tokens"] / metrics["drafts"],
    }
    if one["passes"]:
        result["draft_passes_per_step"] = sum(one["passes"]) / len(one["passes"])
    if not way.some_exact:
        result |= {
            "rescued_tokens_of_fly_jax": own["rescued"],
            "mean_acceptance_length_of_fly_jax": 1 + own["accepted"] / own["drafts"],
        }
    return result


def _save(folder: Path, config: LlamaConfig, parameters: Parameters) -> None:
    """A model, with the embedded pair's tokenizer beside it."""
    save_hf(Llama(config, parameters), folder, jnp.float32)
    carry_tokenizer(EMBEDDED_PAIR[0], open_weights(EMBEDDED_PAIR[0]), folder)


def _write_models(target: Path, draft: Path, family: str) -> None:
    """Target and draft with the same weights."""
    golden = open_weights(_GOLDEN / family).config
    config = replace(golden, head_size=_HEAD_SIZE, sliding_window=None, windowed_layers=())
    # The engine has no Mistral in JAX to be a target, and without windows it is a Llama.
    as_target = "llama" if family == "mistral" else family
    parameters = Llama.random(config, jax.random.key(0)).parameters()
    for folder, architecture in ((target, as_target), (draft, family)):
        _save(folder, replace(config, architecture=architecture), parameters)


def _write_head(target: Path, folder: Path, method: str) -> None:
    """A random target and a random head of it, as EAGLE and DFlash publish theirs."""
    family, num_layers = _HEADS[method]
    golden = open_weights(_GOLDEN / family).config
    config = replace(golden, vocab_size=_WORDS, num_layers=num_layers, head_size=_HEAD_SIZE)
    parameters = Llama.random(config, jax.random.key(1)).parameters()
    # Sharper than it comes, so that texts do not stand still.
    _save(target, config, {n: one if "norm" in n else 3 * one for n, one in parameters.items()})
    of_target = json.loads((target / "config.json").read_text())
    size, ffw = config.embed_size, config.ffw_size
    queries, keys = (n * _HEAD_SIZE for n in (config.num_heads, config.num_kv_heads))
    is_block = method == "dflash"
    seen = size if is_block else 2 * size
    layer = {
        "self_attn.q_proj": (queries, seen), "self_attn.k_proj": (keys, seen),
        "self_attn.v_proj": (keys, seen), "self_attn.o_proj": (size, queries),
        "mlp.gate_proj": (ffw, size), "mlp.up_proj": (ffw, size), "mlp.down_proj": (size, ffw),
        "input_layernorm": (size,), "post_attention_layernorm": (size,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"fc": (size, 3 * size), "norm": (size,)}
    fields = of_target | {"num_hidden_layers": 1}
    if is_block:
        layer |= {"self_attn.q_norm": (_HEAD_SIZE,), "self_attn.k_norm": (_HEAD_SIZE,)}
        shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
        shapes["hidden_norm"] = (size,)
        own = {"mask_token_id": 1, "target_layer_ids": [1, 2, 4]}
        fields |= {
            "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "dflash_config": own,
            "block_size": _HEAD_K + 1, "num_target_layers": num_layers,
            "layer_types": ["full_attention"] * 2,
        }  # fmt: skip
    else:
        layer["hidden_norm"] = (size,)
        shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
        known = np.arange(4, _WORDS)  # none that ends a text
        shapes["lm_head"] = (len(known), size)
        fields |= {"draft_vocab_size": len(known), "tie_word_embeddings": False}
    chance = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": chance.normal(len(shape) == 1, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    if not is_block:
        tensors |= {"d2t": known - np.arange(len(known)), "t2d": np.isin(np.arange(_WORDS), known)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _random_requests(number: int, words: int, limits: tuple[int, ...]) -> _Requests:
    chance = random.Random(0)
    return [
        {
            "prompt": [chance.randrange(3, words) for _ in range(chance.randint(5, 40))],
            "limit": chance.choice(limits) if limits[1:] else limits[0],
        }
        for _ in range(number)
    ]


def _head(method: str) -> dict[str, Any]:
    """What comes of each way to decode with a random head of the engine's own."""
    requests = _random_requests(_HEAD_REQUESTS, _WORDS, (8, 24, 48))
    with tempfile.TemporaryDirectory() as name:
        target, head = Path(name) / "target", Path(name) / "head"
        _write_head(target, head, method)
        pair = Pair(load_llama(target), (load_llama(head),), load_tokenizer(target))
        drafting = {"method": method, "model": str(head), "num_speculative_tokens": _HEAD_K}
        return _in_head_ways(str(target), pair, drafting, 1, requests, skip_tokenizer_init=True)


def _trained(source: str, head: str, prompts: str) -> dict[str, Any]:
    """The same of a trained one; prompts from all over the file that are not long."""
    pair = load_pair(source, head, dtype="float32")
    texts = [one.text for one in read_prompts(prompts, skip_bad=False)]
    chats = ([{"role": "user", "content": one}] for one in texts[:: -(-len(texts) // 24)])
    encoded = map(pair.tokenizer.apply_chat_template, chats)
    requests = [{"prompt": ids, "limit": 48} for ids in encoded if len(ids) <= 400]
    drafting = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
    with tempfile.TemporaryDirectory() as name:
        save_hf(pair.target, Path(name), jnp.float32)
        carry_tokenizer(Path(source), open_weights(Path(source)), Path(name))
        ways = _in_head_ways(name, pair, drafting, 2, requests[:_HEAD_REQUESTS])
    return {"requests": len(requests[:_HEAD_REQUESTS]), "rows": _ROWS, "ways": ways}


def _in_head_ways(
    target: str, pair: Pair, head: dict[str, Any], window: int, requests: _Requests, **given: Any
) -> dict[str, Any]:
    fly = _FLY | {"window_size": window}
    ways = {
        "plain": _Way(),
        "exact": _Way(head, _EXACT),
        "fly": _Way(head, fly),
        "budget, some exact": _Way(head, fly | _BUDGET, some_exact=True),
    }
    return _in_all_ways(target, ways, requests, {head["method"]: pair}, **given)


def _family(family: str) -> dict[str, Any]:
    """Drafted and accepted tokens in each way, and how many answers are plain decoding's."""
    requests = _random_requests(8, _VOCAB, (48,))
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        _write_models(target, draft, family)
        drafting = _MODEL | {"model": str(draft)}
        found = {
            way: vllm_stand_ins.decoded(
                str(target), requests, fly_jax=fly_jax, ranks=ranks, skip_tokenizer_init=True,
                speculative_config=None if fly_jax is None else drafting,
            )
            for way, (fly_jax, ranks) in _FAMILY_WAYS.items()
        }  # fmt: skip
    plain = found.pop("plain")["tokens"]
    return {
        way: {
            "as_plain": sum(a == b for a, b in zip(one["tokens"], plain, strict=True)),
            "drafted": one["metrics"]["draft_tokens"],
            "accepted": one["metrics"]["accepted_tokens"],
        }
        for way, one in found.items()
    }


def _in_all_ways(
    target: str, ways: dict[str, _Way], requests: _Requests, pairs: dict[str, Pair], **given: Any
) -> dict[str, Any]:
    found = {name: _decoded(target, way, requests, **given) for name, way in ways.items()}
    plain = found["plain"]["tokens"]
    results = {}
    for name, way in ways.items():
        pair = way.speculative and pairs[way.speculative["method"]]
        results[name] = _compared(way, found[name], plain, pair, requests)
        print(f"{name}: {results[name]}")
    return results


def main() -> None:
    versions = vllm_stand_ins.versions("vllm-tpu", "tpu-inference")
    jax.config.update("jax_platforms", "cpu")  # here; vLLM's engines have their own processes
    if _TRAINED.value:
        print(write("vllm_trained_head", {**versions, **_trained(*_TRAINED.value)}))
        return
    if _ONLY.value in (None, "pair"):
        pairs = {"draft_model": load_pair(), "ngram": load_pair(_TARGET, "ngram")}
        requests = _requests(pairs["draft_model"])
        ways = _in_all_ways(_TARGET, _WAYS, requests, pairs)
        size = {"requests": _REQUESTS, "rows": _ROWS}
        print(write("vllm_engine", {**versions, **size, "ways": ways}))
    if _ONLY.value in (None, "heads"):
        heads = {method: _head(method) for method in _HEADS}
        print(write("vllm_heads", {**versions, "requests": _HEAD_REQUESTS, "rows": _ROWS, **heads}))
    if _ONLY.value in (None, "families"):
        families = {family: _family(family) for family in _FAMILIES}
        print(families)
        print(write("vllm_families", {**versions, "requests": 8, "families": families}))


if __name__ == "__main__":
    run(main)
