"""The command plan: a pair's needs and speed on a slice of chips, without the slice."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import DecodingFlags, Flags, flag_group
from fly_jax.parameters import parameter

if TYPE_CHECKING:  # imported once JAX knows that it is to leave accelerators alone
    from fly_jax.models.architectures import LlamaConfig
    from fly_jax.planning.plan_spec import PlanSpec

_HELP = """\
python -m fly_jax.launch plan [flags]

Compiles the steps of decoding for a slice that need not be there, and prints what they take of each
chip's memory, what travels between the chips, and how fast decoding would be at best. Without
--rule, --config and K it plans FLy with K = 25, or exact decoding where its window does not fit.

Examples:
  python -m fly_jax.launch plan --target llama-3.1-405b --draft llama-3.1-8b --chip v5e --mesh 8x8
  python -m fly_jax.launch plan --target llama-3.1-70b --draft llama-3.1-8b --chip h200 --mesh 2
  python -m fly_jax.launch plan --config configs/fly_llama3_405b.toml --num_speculative_tokens auto
"""

_DRAFT = "llama-3.1-8b"


@flag_group("Plan")
class _PlanFlags(DecodingFlags):
    target: str = parameter(
        "llama-3.1-405b",
        "preset, folder with config.json, or GGUF file of the model to decode with",
    )
    draft: tuple[str, ...] = parameter(
        (),
        f"the same of the model that proposes, or self:int4 or self:int8, {_DRAFT} if not given; "
        "again for one below it",
    )
    level_accepted_tokens: float | None = parameter(
        None, "mean tokens of a draft's pass over a level below it, if not published", kind=float
    )
    dtype: str = parameter("bfloat16", "type of the matrices of both", choices=("bfloat16", "int8"))
    chip: str = parameter("v5e", "v5e, v5p, v6e, h100, h200 or mi355x")
    mesh: str = parameter("8x8", "chips along each axis; their product is that of a slice")
    compile: bool = parameter(
        True, "ask the compiler in libtpu, and do not count from shapes alone"
    )
    context: int = parameter(8192, "tokens of a row, prompt and new ones together", low=2)
    prompt_length: int | None = parameter(
        None, "tokens of each prompt; all of the context but one if not given", kind=int, low=1
    )
    batch_size: int = parameter(1, "rows decoded together", low=1)
    mean_accepted_tokens: float | None = parameter(
        None, "tokens a round settles; what is published for the pair if not given", kind=float
    )
    audits: bool = parameter(False, "rounds report on every token, as for generate --audit")
    serve: bool = parameter(
        False,
        "the programs of the command serve, whose requests have rules and draws of their own and "
        "whose prompts are run between rounds; if not given, those of generate",
    )
    prefill_chunk: int = parameter(256, "serve: prompt tokens run between two rounds", low=1)
    json: bool = parameter(False, "the plan as one JSON object on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    # The host's look-ups make no difference to a chip.
    without = ("protect", "memory", "csd_min_count")
    values = Flags("plan", _PlanFlags, without).parse(arguments, _HELP)
    # An accelerator that is there is not needed, nor locked; JAX may have read the variable before.
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_platforms", "cpu")

    from fly_jax.planning.planner import make_plan, table

    spec = _plan_spec(values)
    plan = make_plan(spec, lambda step: print(f"planned: {step}", file=sys.stderr, flush=True))
    print(json.dumps(plan.to_dict()) if values.json else table(plan), flush=True)
    if not plan.fits:
        raise FlyJaxError(
            f"It does not fit: {-plan.left_bytes / 2**30:.2f} GiB a chip are missing on "
            f"{spec.chip.name} {spec.mesh}; "
            + (f"it would with {', or with '.join(plan.remedies)}." if plan.remedies else
               "no single change makes it fit: plan int8 on a larger slice or a smaller model.")
        )  # fmt: skip


def _plan_spec(values: _PlanFlags) -> PlanSpec:
    from fly_jax.decoding.config import RoundSpec, largest_depth
    from fly_jax.models.quantise import SELF, self_draft_type
    from fly_jax.planning.plan_spec import PlanSpec
    from fly_jax.planning.roofline import PUBLISHED_K
    from fly_jax.sharding.chips import chip_named
    from fly_jax.sharding.mesh import parse_mesh

    draft, *below = values.draft or (_DRAFT,)
    own = self_draft_type(draft) if draft.startswith(SELF) else None
    config = values.to_config()
    if values.config is None:
        if not values.gives("num_speculative_tokens"):
            config = config.replace(num_speculative_tokens=PUBLISHED_K)
        k = largest_depth(config.num_speculative_tokens)
        # FLy's rule if none is given, or a lossless one where its window does not fit.
        fits = k > config.fly.window_size or config.drafting.boundary == "defer"
        if not (values.gives("rule") or fits):
            config = config.replace(rule="sampled" if config.sampling.temperature else "exact")
    served: dict[str, Any] = {}
    if values.serve:
        try:
            from fly_jax.serving.http.request_builder import RequestBuilder
        except ModuleNotFoundError as error:
            said = f"--serve needs {error.name}, which is not installed; install it with "
            raise FlyJaxError(f"{said}pip install 'fly_jax[serve]'.") from error
        builder = RequestBuilder.of(config)
        config = builder.for_engine
        served = {"prefill_chunk": values.prefill_chunk, "rules": tuple(builder.kinds)}
    audits = values.audits or values.serve
    target, is_int8 = _config(values.target)
    if is_int8 and values.dtype != "int8":
        print("The target is stored in int8; --dtype int8 plans it so.", file=sys.stderr)
    return PlanSpec(
        target=target, draft=target if own else _config(draft)[0],
        below=tuple(_config(one)[0] for one in below), chip=chip_named(values.chip),
        mesh=parse_mesh(values.mesh), int8=values.dtype == "int8", self_draft=own,
        rows=values.batch_size,
        rounds=RoundSpec.of(config, num_drafts=1 + len(below), audits=audits),
        level_accepted_tokens=values.level_accepted_tokens,
        mean_accepted_tokens=values.mean_accepted_tokens, context=values.context,
        prompt_length=values.prompt_length, compiles=values.compile, **served,
    )  # fmt: skip


def _config(name: str) -> tuple[LlamaConfig, bool]:
    """The configuration of a preset, a file or a folder, and whether it is stored in int8."""
    from fly_jax.models.architectures import read_config
    from fly_jax.models.checkpoints.converted import RECORD
    from fly_jax.models.checkpoints.load import open_weights
    from fly_jax.models.checkpoints.source import is_gguf
    from fly_jax.models.presets import preset

    path = Path(os.path.expanduser(name))
    if is_gguf(path) or (path / RECORD).exists() or any(path.glob("*.safetensors")):
        try:
            source = open_weights(path)  # reads no weight, and knows more than config.json says
            return source.config, source.int8
        except FlyJaxError:
            if not (path / "config.json").exists():  # the weights may still be on their way
                raise
    return read_config(path) if path.is_dir() else preset(name), False
