"""The command bench: several decodings of the same prompts, in turns, with the times of rounds."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fly_jax.decoding.config import DecodingConfig, decoding_parameters
from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, ModelFlags, RunFlags, flag_group
from fly_jax.launch.inputs import distributed_session, load_models, open_inputs, say
from fly_jax.parameters import parameter
from fly_jax.sharding.processes import broadcast, joint_errors, process_id

if TYPE_CHECKING:
    from fly_jax.evaluation.compare import Comparison

_HELP = """\
python -m fly_jax.launch bench [flags]
python -m fly_jax.launch bench serve --url http://localhost:8000 [flags]

Decodes the same prompts with several rules and K, in turns, and prints the speed of each, what its
rounds settled, and what of a round the draft took. Everything is compiled before. The second form
measures a server, ours or any other with OpenAI's API.

Examples:
  python -m fly_jax.launch bench
  python -m fly_jax.launch bench --decode autoregressive --decode exact:2,4,8 --decode fly:15
  python -m fly_jax.launch bench --target target.gguf --draft draft.gguf --turns 3 \\
    --prompts_file question.jsonl --picture speed.svg --json > speed.json
"""

# Default K of exact decoding: the fastest of them is tuned exact decoding.
_EXACT_DEPTHS = (2, 4, 8, 15)
_PICTURE_WIDTH, _BAR_HEIGHT = 8.0, 0.4  # in inches


@flag_group("Bench")
class _BenchFlags(RunFlags):
    decode: tuple[str, ...] = parameter(
        (),
        "a rule, with its K behind a colon, or several of them, and its own parameters: "
        "'fly:8,15 window_size=4'; if not given, one token at a time, exact decoding with the "
        f"chosen K and {', '.join(map(str, _EXACT_DEPTHS))}, FLy, and the chosen rule",
    )
    turns: int = parameter(3, "measurements of each decoding", low=1)
    draft_share: bool = parameter(
        True, "measure what of a round the draft models take, by rounds without them"
    )
    each: int | None = parameter(
        None, "most prompts of each category of the file; all if not given", kind=int, low=1
    )
    picture: str | None = parameter(
        None, "file for the speeds as bars, such as speed.svg; needs the extra fly_jax[bench]"
    )
    json: bool = parameter(False, "all figures as one JSON object on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    if arguments and arguments[0] == "serve":
        from fly_jax.launch import bench_serve

        bench_serve.main(arguments[1:])
        return
    values = Flags("bench", _BenchFlags).parse(arguments, _HELP)
    with distributed_session(values):
        _run(values)


def _run(values: _BenchFlags) -> None:
    with joint_errors():
        if values.picture is not None and process_id() == 0:
            check_picture(Path(values.picture))
    config = values.to_config(values)
    configs = decodings(values.decode, config, values)
    longest = functools.partial(max, key=lambda one: one.drafting.max_speculative_tokens)
    inputs = open_inputs(values, longest(configs.values()))
    asked = configs if values.decode else {_name(config): config}
    for name, one in {**configs, **asked}.items():
        try:
            inputs.models.check_drafting(one)
        except FlyJaxError:
            if name in asked:
                raise
            del configs[name]  # whose K nobody asked for
            say(f"{name} is left out, since the draft cannot draft so.")
    inputs = dataclasses.replace(inputs, config=longest(configs.values()))
    categories = [prompt.category for prompt in inputs.prompts]
    most = values.each or len(categories)
    kept = broadcast([at for at, one in enumerate(categories) if categories[:at].count(one) < most])
    pair = load_models(values, inputs)

    from fly_jax.evaluation.compare import compare
    from fly_jax.evaluation.machine import describe

    say(f"{len(kept)} prompts, {values.batch_size} at a time; turns: {values.turns}")
    sizes: dict[str, Any] = {
        "max_new_tokens": values.max_new_tokens, "batch_size": values.batch_size,
        "turns": values.turns,
    }  # fmt: skip
    ids, own = zip(*((inputs.ids[index], categories[index]) for index in kept), strict=True)
    more: Any = {"seed": values.seed, "draft_share": values.draft_share}
    found = compare(pair, ids, configs, categories=own, **more, **sizes)
    if config.sampling.temperature > 0 and not values.decode:  # as `evaluate` writes it down
        config = config.replace(temperature=config.sampling.temperature)
    if process_id() != 0:
        return
    print(found.table(), file=sys.stderr if values.json else sys.stdout, flush=True)
    result = {
        "machine": describe(), "target": values.target or "embedded", "draft": list(values.draft),
        "dtype": values.dtype or inputs.models.default_dtype(inputs.mesh.size),
        "decoding": unusual(config), "prompts": len(kept), **sizes, "decodings": found.to_dict(),
    }  # fmt: skip
    if values.json:
        print(json.dumps(result), flush=True)
    if values.picture is not None:
        draw(found, Path(values.picture))


def unusual(config: DecodingConfig) -> dict[str, Any]:
    """The values that are not the defaults, but for the rule and K, which decodings name."""
    usual, found = DecodingConfig().to_dict(), config.to_dict().items()
    shared = {"rule", "num_speculative_tokens", "lossless_speculative_tokens"}
    return {key: of for key, of in found if key not in shared and of != usual[key]}


def decodings(
    given: Sequence[str], config: DecodingConfig, models: ModelFlags
) -> dict[str, DecodingConfig]:
    """The configs of a bench by their names, all checked; others are compared with the first.

    Args:
      given: such as "fly:8,15 window_size=4"; none for plain and exact decoding, and the config's.
      config: has all that is not given.
      models: tell whether a draft was given; a rule without one needs a lookup of its own.
    """
    found: dict[str, DecodingConfig] = {}
    for text in given:
        words = text.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        rule, _, several = " ".join(word for word in words if "=" not in word).partition(":")
        values = {name: _value(name, of) for name, of in options.items()}
        own = config.replace(**{"rule": rule.strip()} | values)
        for depth in several.split(",") if several else [None]:
            one = own.replace(**_depth(text, depth))
            found[", ".join([_name(one), *map("=".join, options.items())])] = one
    if not given and models.proposes(config):
        plain, lossless, *loosened = config.side_by_side()
        exact = [lossless.replace(num_speculative_tokens=k) for k in _EXACT_DEPTHS]
        found = {_name(one): one for one in (plain, lossless, *exact, *loosened)}
    elif not given:
        plain = config.without_draft()
        found = {_name(plain): plain}
    for one in found.values():
        if one.to_rule().uses_memory and one.limits.memory is not None:
            raise FlyJaxError(
                f"memory is {one.limits.memory}, and bench and evaluate begin with an empty one; "
                "leave it out, or measure the rule with --compare, which reads it."
            )
        if one.num_speculative_tokens and not models.proposes(one):
            raise FlyJaxError(
                f"The rule {one.rule} was asked for, and nothing proposes; give --draft, which may "
                "be ngram, or --decode autoregressive."
            )
    return found


def _value(name: str, text: str) -> Any:
    """The value of an option: a number, true, false or null as in JSON, or a text."""
    known = decoding_parameters().get(name)
    if known is not None and known.kind is tuple:
        return (text,) if text else ()
    try:
        return json.loads(text)
    except ValueError:
        return text


def _depth(text: str, given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    depth = given.strip()
    if depth != "auto" and not depth.isdecimal():
        raise FlyJaxError(
            f"--decode {text} has K {given!r}; give whole numbers or auto, as in exact:2,4,auto."
        )
    return {"num_speculative_tokens": depth if depth == "auto" else int(depth)}


def _name(config: DecodingConfig) -> str:
    depth = config.num_speculative_tokens
    return f"{config.rule}, K = {depth}" if depth else config.rule


def check_picture(path: Path) -> None:
    """Raises FlyJaxError where no picture can be drawn into a file."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise FlyJaxError(
            "--picture was given, and matplotlib is not installed; pip install 'fly_jax[bench]', "
            "or leave it out."
        ) from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in kinds or not path.parent.is_dir():
        raise FlyJaxError(
            f"--picture is {path}; give a file in a folder that is there, whose name ends in "
            ".svg, .png or .pdf."
        )


def draw(found: Comparison, path: Path) -> None:
    """Draws the speeds as bars, with the turns' deviation and the speed-up over the first."""
    from matplotlib.figure import Figure

    results = found.results[::-1]
    figure = Figure(figsize=(_PICTURE_WIDTH, 1 + _BAR_HEIGHT * len(results)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [one.name for one in results],
        [one.tokens_per_second for one in results],
        xerr=[one.deviation or 0.0 for one in results],
        color=["#888888" if one is found.results[0] else "#3b6fb6" for one in results],
    )
    axes.bar_label(bars, [f"{found.speed_up(one):.2f}x" for one in results], padding=4)
    axes.set_xlabel("tokens per second")
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
