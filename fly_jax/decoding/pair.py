"""A target, what proposes to it, and their tokenizer: opened, checked, loaded; checked prompts."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fly_jax.decoding.config import (
    DecodingConfig,
    RoundSpec,
    RoundStatic,
    check_patterns,
    default_config,
)
from fly_jax.decoding.drafters.drafter import Drafter
from fly_jax.decoding.drafters.head_draft import BlockDraft, HeadDraft
from fly_jax.decoding.drafters.lookup import Lookup
from fly_jax.decoding.drafters.model import DraftModel, ParallelDraft
from fly_jax.errors import FlyJaxError
from fly_jax.models import llama
from fly_jax.models.architectures import INT8, LlamaConfig, parameter_specs
from fly_jax.models.checkpoints.load import Checkpoint, Say, load_llama, open_checkpoint
from fly_jax.models.checkpoints.source import EMBEDDED_PAIR, identity, resolve
from fly_jax.models.head import BlockHead, Eagle3Head
from fly_jax.models.head_config import Block
from fly_jax.models.layouts import Layouts, Workload, choose_layouts
from fly_jax.models.llama import LARGE_BYTES, Llama
from fly_jax.models.quantise import SELF, check_self_draft, self_draft, self_draft_type
from fly_jax.models.tokenizer import Tokenizer, check_unicode
from fly_jax.sharding.chips import chip_of
from fly_jax.sharding.mesh import AXES, MeshSpec, create_mesh, parse_mesh, prepare_devices
from fly_jax.sharding.processes import check_same, joint_errors, num_processes
from fly_jax.sharding.rules import Layout

NGRAM = "ngram"  # the lookup alone

Build = Callable[[Llama, RoundStatic], Drafter]

_BUILDS: dict[str, Build] = {NGRAM: lambda _, static: static.lookup or Lookup()}


class CheckedPrompt(tuple[int, ...]):
    """A prompt that `check_prompt` has passed; an engine of the same target takes it as it is."""


def check_prompt(
    prompt: Sequence[int], config: LlamaConfig, *, name: str = "The prompt"
) -> CheckedPrompt:
    """Checks a prompt, unless that has been done already.

    FlyJaxError where it is empty, leaves no room in the context, or has ids beyond the vocabulary
    (which an array lookup would silently take for other tokens).
    """
    if isinstance(prompt, CheckedPrompt):
        return prompt
    if prompt is None or isinstance(prompt, numbers.Integral | bytes):
        raise FlyJaxError(
            f"{name} is {prompt!r}; it must be a text or a list of token ids: give [ids] for one."
        )
    if len(prompt) == 0:
        raise FlyJaxError(f"{name} is empty; decoding needs at least one token: give some text.")
    if len(prompt) >= config.max_context:
        raise FlyJaxError(
            f"{name} has {len(prompt)} tokens and the model's context is {config.max_context}; at "
            "least one position must be left for new text: shorten the prompt."
        )
    if not all(isinstance(x, numbers.Integral) and 0 <= x < config.vocab_size for x in prompt):
        raise FlyJaxError(
            f"{name} has token ids outside the model's vocabulary of {config.vocab_size}, or that "
            "are no whole numbers; tokenise it with the model's own tokenizer, and give a list."
        )
    return CheckedPrompt(prompt)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target with its drafts and tokenizer: all that decoding needs.

    Attributes:
      drafts: the models that propose, the first to the target and each other one to the one before
        it; none to decode with the target alone.
      replicated: one line for each kind of axis of the target that the mesh could not divide.
      is_embedded: it is the pair that ships with the package.
      drafter: what proposes instead of draft models: a registered name, or the drafter itself.
    """

    target: Llama
    drafts: tuple[Llama, ...]
    tokenizer: Tokenizer
    replicated: tuple[str, ...] = ()
    is_embedded: bool = False
    drafter: str | Drafter | None = None

    @property
    def draft(self) -> Llama | None:
        """The model that proposes to the target, if there is one."""
        return self.drafts[0] if self.drafts else None

    def config(self, config: DecodingConfig | None = None, **given: Any) -> DecodingConfig:
        """The config of this pair: the given values, laid over a config.

        Where nothing proposes, or K is 0, it decodes one token at a time, whatever the rule.
        None is `default_config`. For the values, and errors, see `DecodingConfig`; K may be 0.
        """
        drafts = given.get("num_speculative_tokens") != 0
        if not drafts:
            del given["num_speculative_tokens"]
        config = config or default_config(is_embedded=self.is_embedded)
        config = config.replace(**given) if given else config
        if self.drafter == NGRAM and not config.looks_up:
            config = config.replace(prompt_lookup_max=Lookup.max_ngram)
        proposes = self.drafts or self.drafter or config.looks_up
        return config if drafts and proposes else config.without_draft()

    def spec(
        self, config: DecodingConfig | None = None, *, rounds_per_dispatch: int | None = None,
        audits: bool = False, **given: Any,
    ) -> RoundSpec:  # fmt: skip
        """The spec of the rounds; see `config` for what may be given.

        `rounds_per_dispatch` are rounds before tokens leave the device; None takes 4 for a small
        target on a CPU, where dispatching takes time from a round, and 1 everywhere else.
        FlyJaxError also for values of which no round can be made, such as K that leaves no room for
        FLy's window.
        """
        is_short = jax.default_backend() == "cpu" and not self.target.is_large
        most = (4 if is_short else 1) if rounds_per_dispatch is None else rounds_per_dispatch
        return RoundSpec.of(
            self.config(config, **given), num_drafts=len(self.drafts),
            eos_token_ids=self.tokenizer.eos_token_ids, rounds_per_dispatch=most, audits=audits,
        )  # fmt: skip

    def proposing(self, spec: RoundSpec) -> Sequence[Llama] | Drafter:
        """The draft models of rounds of this kind, or the drafter in their place.

        FlyJaxError for the name of a drafter that there is not.
        """
        drafter = self.drafter
        if isinstance(drafter, str) and spec.static.num_speculative_tokens:
            if drafter not in _BUILDS:
                raise FlyJaxError(
                    f"There is no drafter '{drafter}'; there are {', '.join(_BUILDS)}: give one of "
                    "them, or register yours with register_drafter."
                )
            drafter = _BUILDS[drafter](self.target, spec.static)
        return drafter if isinstance(drafter, Drafter) else self.drafts

    def protected_token_ids(self, protect: Sequence[str]) -> tuple[int, ...]:
        """Control tokens and those that a pattern matches; FlyJaxError for a wrong pattern."""
        check_patterns(protect)
        return (*self.tokenizer.control_token_ids, *self.tokenizer.matching(protect))


Dtype = Literal["float32", "bfloat16", "int8"]


@dataclasses.dataclass(frozen=True)
class OpenPair:
    """Models, opened and checked against each other; `self_draft` rounds the target's matrices."""

    target: Checkpoint
    drafts: tuple[Checkpoint, ...]
    is_embedded: bool
    drafter: str | None = None
    self_draft: str | None = None

    @property
    def draft_decodes_alone(self) -> bool:
        """Tells whether the first drafter is a language model that could decode alone."""
        config = self.drafts[0].config if self.drafts else None
        is_model = config is not None and config.head is None and config.pard_token is None
        return is_model or self.self_draft is not None

    @property
    def float_dtype(self) -> Dtype:
        """The type of what stays a float, where none is asked for. Starts JAX's backend."""
        is_small = self.target.path == EMBEDDED_PAIR[0]
        return "float32" if is_small or jax.default_backend() == "cpu" else "bfloat16"

    def default_dtype(self, num_devices: int) -> Dtype:
        """The weights' type where none is asked for: the fastest on so many devices.

        One CPU device decodes a large model two to three times as fast in int8, and no loss was
        seen (docs/weights.md). A draft made of the target's own matrices needs them whole.
        """
        is_large = 4 * self.target.num_parameters >= LARGE_BYTES
        alone = num_devices == 1 and jax.default_backend() == "cpu"
        return "int8" if alone and is_large and self.self_draft is None else self.float_dtype

    @property
    def max_context(self) -> int:
        """The most tokens that the target sees."""
        return self.target.config.max_context

    def check_drafting(self, config: DecodingConfig) -> None:
        """Raises FlyJaxError for drafts that cannot draft as the config says."""
        if self.drafter in (None, NGRAM):
            static = RoundSpec.of(config, num_drafts=len(self.drafts)).static
            check_chain(self.target.config, [one.config for one in self.drafts], static)
            head = self.drafts[0].config.head if self.drafts else None
            if config.num_speculative_tokens == "auto" and isinstance(head, Block):
                config.replace(num_speculative_tokens=head.most_tokens).to_rule()

    def encode(
        self, prompt: str | Sequence[Mapping[str, str]], *, name: str = "The prompt"
    ) -> CheckedPrompt:
        """The tokens of a text or a conversation, for an engine of this pair.

        FlyJaxError: the target cannot continue them, or its chat template refuses the messages.
        """
        tokenizer = self.target.tokenizer
        texts = [prompt] if isinstance(prompt, str) else [t for one in prompt for t in one.values()]
        check_unicode("".join(texts), name)
        if isinstance(prompt, str):
            return check_prompt(tokenizer.encode(prompt), self.target.config, name=name)
        try:
            ids = tokenizer.apply_chat_template(prompt)
        except FlyJaxError as error:
            raise FlyJaxError(f"{name}: {error}") from error
        return check_prompt(ids, self.target.config, name=name)


def open_pair(
    target: str | Path | None = None, draft: str | Path | Sequence[str | Path] | None = None, *,
    revision: str | None = None, draft_parallel: int | None = None,
) -> OpenPair:  # fmt: skip
    """Finds the models that `load_pair` is given, and checks all it can without reading a weight.

    With `draft_parallel` the last draft model drafts in one pass, with this as its `pard_token`.
    FlyJaxError for a checkpoint that is missing or broken, or two vocabularies.
    """
    if target is None and revision is not None:
        raise FlyJaxError(
            f"The revision '{revision}' was given without a target; give the hub id that it is of."
        )
    drafts = (draft,) if isinstance(draft, str | Path) else tuple(draft or ())
    is_embedded = target is None and not drafts
    names = map(str, drafts)
    drafter = next((one for one in names if one in _BUILDS or one.startswith(SELF)), None)
    own = None
    if drafter is not None:
        if len(drafts) > 1:
            raise FlyJaxError(
                f"The drafter {drafter} was given with other drafts, and proposes alone; give "
                "either it or the others (prompt_lookup_max puts a lookup below draft models)."
            )
        drafts = ()
        if drafter not in _BUILDS:
            self_draft_type(drafter)
            own, drafter = drafter, None
    folder, embedded_draft = EMBEDDED_PAIR
    if target is not None:
        folder = resolve(str(target), revision)
    folders = [embedded_draft] if is_embedded else [resolve(str(one)) for one in drafts]
    opened = open_checkpoint(folder)
    proposing = tuple(open_checkpoint(one, opened) for one in folders)
    if draft_parallel is not None:
        if not proposing:
            raise FlyJaxError(
                f"draft_parallel is {draft_parallel}, a token that a draft model answers in one "
                "pass, and there is no draft model; give one, or leave it out."
            )
        last = proposing[-1].source
        if last.config.head is not None:
            raise FlyJaxError(
                f"draft_parallel is {draft_parallel}, and the last draft is a head, which answers "
                "no such token; leave it out."
            )
        last.config = dataclasses.replace(last.config, pard_token=draft_parallel)
    for one in proposing:
        opened.check_draft(one)
    check_chain(opened.config, [one.config for one in proposing])
    return OpenPair(opened, proposing, is_embedded, drafter, own)


def load_pair(
    target: str | Path | OpenPair | None = None,
    draft: str | Path | Sequence[str | Path] | None = None, *, revision: str | None = None,
    mesh: str | MeshSpec | Mesh = "1x1", dtype: Dtype | None = None,
    workload: Workload | None = None, weights_cache: str | Path | None = "off",
    say: Say = warnings.warn,
) -> Pair:  # fmt: skip
    """Loads a target and its draft model straight into a mesh.

    FlyJaxError for a checkpoint that is missing or broken, two vocabularies, or a mesh that does
    not fit the devices. All but broken values are found before any weight is read.

    Args:
      target: folder of a Hugging Face checkpoint or of a converted one, a GGUF file, or a hub id;
        None for the embedded pair. Or what `open_pair` gives, its drafts included.
      draft: the same for the draft model, or for several, of which the first proposes to the target
        and each other one to the one before it; None decodes with the target alone (unless the
        embedded pair is meant). Or the name of a drafter: "ngram" looks drafts up in the text so
        far, and `register_drafter` adds others. Or "self:int4" or "self:int8": the target's own
        matrices, rounded: its layers take 9/32 or half of the bytes that they take in bfloat16,
        and half on a CPU, where both are kept in 8 bits.
      revision: branch, tag or commit of the target's hub id. A draft's stands in its id, as in
        "meta-llama/Llama-3.2-1B-Instruct@main", and a target's may.
      mesh: such as "8x8" or "data=2,x=8,y=8", or one that was made by `create_mesh`.
      dtype: of the weights and the caches; None takes float32 for the embedded pair and on
        CPUs, and bfloat16 for other models on accelerators, but int8 on one CPU device for a target
        of a gibibyte in float32 and more. "int8" is for matrices, with that type for the rest;
        those of a folder converted to int8 are int8 with any of them.
      workload: what will be decoded, or None for one row of some thousand tokens; it decides how
        both models lie on the mesh, not what can be decoded afterwards.
      weights_cache: folder that keeps what was converted for one device, and "off" for none; it
        and `say` are those of `load_llama`.
    """
    if dtype not in (None, *get_args(Dtype)):
        raise FlyJaxError(
            f"load_pair was given dtype={dtype!r}; it takes {', '.join(get_args(Dtype))}, as text."
        )
    spec = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    if isinstance(spec, Mesh) and not set(spec.axis_names) <= set(AXES):
        parse_mesh(",".join(f"{name}={size}" for name, size in spec.shape.items()))
    if isinstance(target, OpenPair):
        if (draft, revision) != (None, None):
            raise FlyJaxError(
                "load_pair was given an opened pair, which has drafts of its own, and a draft or a "
                "revision; give them to open_pair."
            )
        opened = target
    else:
        with joint_errors():
            opened = open_pair(target, draft, revision=revision)
    if isinstance(spec, MeshSpec) and spec.num_devices > 1:
        # Has no effect once something else has started JAX's backend.
        prepare_devices(spec, num_processes())
    devices = spec if isinstance(spec, Mesh) else create_mesh(spec)
    if devices.size > 1 and num_processes() > 1:  # each reads its own copy of the files
        with joint_errors():
            target, *others = [identity(one.path)[:12] for one in (opened.target, *opened.drafts)]
        check_same({"target": f"of digest {target}", "draft": f"of digest {', '.join(others)}"})
    if devices.size == 1 and devices.devices.flat[0] != jax.local_devices()[0]:
        raise FlyJaxError(
            f"The mesh has one device, {devices.devices.flat[0]}, and a model on one lies on this "
            "machine's first; make it the only visible one, as with CUDA_VISIBLE_DEVICES."
        )
    dtype = dtype or opened.default_dtype(devices.size)
    int8, stored_int8 = dtype == "int8", opened.target.source.int8
    own = None if opened.self_draft is None else self_draft_type(opened.self_draft)
    if own is not None:
        check_self_draft(own, int8=int8 or stored_int8)
    width = jnp.dtype(opened.float_dtype if int8 else dtype)
    # Padding of a larger vocabulary is left out.
    vocab_size = min(one.config.vocab_size for one in (opened.target, *opened.drafts))
    layouts: Layouts | None = None
    replicated: tuple[str, ...] = ()
    if devices.size > 1:
        config = dataclasses.replace(opened.target.config, vocab_size=vocab_size)
        draft_config = config if own else None
        if opened.drafts:
            draft_config = dataclasses.replace(opened.drafts[0].config, vocab_size=vocab_size)
        chip = chip_of(jax.devices()[0].device_kind)
        matrices = INT8 if int8 or stored_int8 else None
        wanted = dataclasses.replace(workload or Workload(), matrices=matrices)
        below = [one.config for one in opened.drafts[1:]]
        layouts = choose_layouts(devices, config, draft_config, wanted, chip, own, below)
        replicated = tuple(layouts.target.fallbacks(parameter_specs(config)))

    def load(one: Checkpoint, layout: Layout | None, apart: bool = True) -> Llama:
        has_integers = int8 or one.source.int8
        separates = apart and llama.separates_layers(one.config, layout, has_integers=has_integers)
        model = load_llama(
            one, layout=layout, dtype=width, int8=int8, vocab_size=vocab_size,
            unstacked=jax.default_backend() == "cpu" and separates,
            weights_cache=weights_cache, say=say,
        )  # fmt: skip
        if apart and llama.runs_unstacked(model):
            model.unstack()
        return model

    loaded = load(opened.target, None if layouts is None else layouts.target)
    draft_layout = None if layouts is None else layouts.draft
    # A head's tables, which may be the target's, lie as those do.
    apart = [one.config.head is None or loaded.is_unstacked for one in opened.drafts]
    drafts = [load(one, draft_layout, each) for one, each in zip(opened.drafts, apart, strict=True)]
    if own is not None:
        drafts = [self_draft(loaded, own, held=INT8 if llama.lies_on_cpu(loaded) else None)]
        for one in filter(llama.runs_unstacked, drafts):
            one.unstack(owner=loaded if loaded.is_unstacked else None)
    tokenizer, is_embedded = opened.target.tokenizer, opened.is_embedded
    return Pair(loaded, tuple(drafts), tokenizer, replicated, is_embedded, opened.drafter)


def checked_drafter(
    target: Llama, draft: Llama | Sequence[Llama] | Drafter | None, static: RoundStatic
) -> Drafter | None:
    """The drafter: the one that was given, the lookup alone, or None where K is 0.

    FlyJaxError where K is asked for and nothing proposes, for too few or many draft models, one of
    another vocabulary, a confidence that none of them has, or K above a head's block.
    """
    if not static.num_speculative_tokens:
        return None
    if isinstance(draft, Drafter):
        return draft
    models = (draft,) if isinstance(draft, Llama) else tuple(draft or ())
    if not models and static.lookup is None:
        raise FlyJaxError(
            f"{static.num_speculative_tokens} speculative tokens were asked for without a draft "
            "model or a lookup; speculation needs one of them: give a draft or a lookup, or "
            "num_speculative_tokens=0."
        )
    if models and len(models) != 1 + len(static.level_speculative_tokens):
        raise FlyJaxError(
            f"{len(models)} draft models were given, and level_speculative_tokens has "
            f"{len(static.level_speculative_tokens)} numbers; it needs one for each draft model "
            "but the first: correct it."
        )
    for one in models:
        if one.config.vocab_size != target.config.vocab_size:
            raise FlyJaxError(
                f"A draft model has {one.config.vocab_size} tokens and the target "
                f"{target.config.vocab_size}; both need the same vocabulary: choose a draft "
                "model of the target's family."
            )
    check_chain(target.config, [one.config for one in models], static)
    if models and models[-1].config.head is not None:
        *above, head = models
        kind = BlockHead if isinstance(head.config.head, Block) else Eagle3Head
        below = (target, *above)[-1]  # whose tables it may share, and then lies as they do
        models = (*above, kind.on(llama.for_backend(head) if below.is_unstacked else head, below))
    return drafter_of(models, static)


def check_chain(
    target: LlamaConfig, drafts: Sequence[LlamaConfig], static: RoundStatic | None = None
) -> None:
    """Raises FlyJaxError for drafts that cannot stand so, or cannot draft for these rounds."""
    static = RoundStatic(0) if static is None else static
    confidence = static.draft_confidence
    # A chosen K may be larger than a block, which is then as long.
    k = 0 if static.depths else static.num_speculative_tokens
    sizes = (k, *static.level_speculative_tokens)
    for above, config, below in zip((target, *drafts), drafts, (*drafts[1:], None), strict=False):
        beneath = below or (None if above is target else static.lookup)
        if beneath is not None and (config.head is not None or config.pard_token is not None):
            what = "draft model with a pard_token" if config.head is None else "head"
            raise FlyJaxError(
                f"A {what} was given with a draft below it, or below a draft model with a lookup, "
                "and takes no drafts from below; make it the last --draft, and leave "
                "prompt_lookup_max out."
            )
        if config.head is not None:
            _check_head(above, config, "target" if above is target else "draft model above it")
    for level, (config, size) in enumerate(zip(drafts, sizes, strict=False)):
        if isinstance(config.head, Block) and size > config.head.most_tokens:
            name = "level_speculative_tokens" if level else "num_speculative_tokens"
            raise FlyJaxError(
                f"{name} is {size}, and the head drafts at most {config.head.most_tokens} tokens "
                f"in a block; give {name}={config.head.most_tokens} or less."
            )
    blocks = [one.head for one in drafts if isinstance(one.head, Block)]
    if confidence and not any(one.has_confidence for one in blocks):
        raise FlyJaxError(
            f"draft_confidence is {confidence}, and no draft says how probable its tokens are to "
            "be accepted; leave it out, or give a DSpark head with a confidence head as a draft."
        )


def _check_head(target: LlamaConfig, config: LlamaConfig, of: str) -> None:
    """Raises FlyJaxError for a head that is none of the model that it would propose to."""
    head = config.head
    assert head is not None
    layers, shares = head.layers_of(target.num_layers), not head.has_embedding
    are_there = 0 <= min(layers) <= max(layers) < target.num_layers
    wrong = {
        f"features of width {head.target_embed_size}": head.target_embed_size != target.embed_size,
        f"that model's embedding for a width of {config.embed_size}": shares
        and config.embed_size != target.embed_size,
        "that model's embedding, which has not all tokens,": shares
        and target.draft_vocab_size is not None,
        f"a vocabulary of {config.vocab_size}": config.vocab_size != target.vocab_size,
        f"layers {', '.join(map(str, layers))}": not are_there,
    }
    if isinstance(head, Block) and head.target_num_layers not in (None, target.num_layers):
        wrong[f"a target of {head.target_num_layers} layers"] = True
    for what in (what for what, is_wrong in wrong.items() if is_wrong):
        raise FlyJaxError(
            f"The head reads {what}, and the {of} has a width of {target.embed_size}, "
            f"{target.vocab_size} tokens and {target.num_layers} layers; give the head that was "
            f"trained for this {of.split()[0]}."
        )


def drafter_of(models: Sequence[Llama], static: RoundStatic) -> Drafter | None:
    """The drafter that rounds ask for: a chain of draft models above the lookup, or less.

    The lookup stands in front of a last one that nothing can stand below.
    """
    drafter: Drafter | None = static.lookup
    kind: Callable[..., Drafter]
    sizes = (static.num_speculative_tokens, *static.level_speculative_tokens)
    for level in reversed(range(len(models))):
        model, kind = models[level], DraftModel
        model = llama.for_backend(model) if model.config.head is None else model
        config, lags, rests = model.config, level > 0, level == 0 and 0 in static.depths
        given: dict[str, Any] = {"lags": lags}
        if isinstance(config.head, Block):
            kind, given["least_confidence"] = BlockDraft, static.draft_confidence
        elif config.head is not None:
            kind, given["rests"] = HeadDraft, rests
        elif config.pard_token is not None:
            kind, given["rests"] = ParallelDraft, lags or rests
        else:
            given |= {"below": drafter, "margin": static.level_margin, "rests": rests}
        if kind is not DraftModel:
            given["in_front"] = static.lookup
        given |= {"config": config, "layout": model.layout, "num_speculative_tokens": sizes[level]}
        drafter = kind(model.parameters(), **given)
    return drafter


def register_drafter(name: str, build: Build) -> None:
    """Makes a drafter known by a name, to give as a draft; FlyJaxError where another has it.

    Args:
      name: stands before a folder or hub id that is called so.
      build: makes it for a target and the rounds that it is to draft for. A target that lies
        on a CPU may be unstacked; `target.stacked()` has its parameters as `parameter_specs` says.
    """
    if name in _BUILDS and _BUILDS[name] is not build:
        raise FlyJaxError(f"There is a drafter '{name}' already; give yours another name.")
    _BUILDS[name] = build
