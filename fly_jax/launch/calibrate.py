"""The command calibrate: fills a memory for the rule csd, or finds how strict a rule must be."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from fly_jax.decoding.config import DecodingConfig, Drafting
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation import strictness
from fly_jax.launch.flags import BatchFlags, DecodingFlags, Flags, ProcessFlags, flag_group, givens
from fly_jax.launch.inputs import Inputs, distributed_session, load_models, open_inputs, say
from fly_jax.parameters import parameter, parameters_of
from fly_jax.sharding.processes import broadcast, joint_errors, process_id

_HELP = """\
python -m fly_jax.launch calibrate --prompts_file FILE (--memory OUT | --gate OUT) [flags]

Learns from prompts without answers, which it continues.

--memory counts which draft token the target puts which of its own in the place of. The rule csd
then keeps what was corrected often and matters little. A run that was interrupted goes on where it
was when it is started again.

--gate finds how lax a rule may be, and how long its window must be, to meet a bound, and writes a
config: --max_disagreement 0.02 lets 2 tokens in 100 be others than the target would choose.

Examples:
  python -m fly_jax.launch calibrate --prompts_file prompts.jsonl --memory corrections.npz
  python -m fly_jax.launch --rule csd --memory corrections.npz --prompts_file questions.jsonl
  python -m fly_jax.launch calibrate --prompts_file prompts.jsonl --gate two_percent.toml \\
    --max_disagreement 0.02 --batch_size 8
  python -m fly_jax.launch --config two_percent.toml --prompts_file questions.jsonl
"""


@flag_group("Gate")
class _GateFlags:
    max_disagreement: float | None = parameter(
        None,
        "most rescues per token: the share of tokens that are not what the target, given the text "
        "before them, finds most probable",
        kind=float,
    )
    max_regret: float | None = parameter(
        None, "instead: most nats a token that rescues fall short of the target's own", kind=float
    )
    rule: str | None = parameter(
        None,
        f"a loosened rule ({', '.join(strictness.CALIBRATED)}), or several joined by & and |, of "
        "which the first is varied; that of the config if not given, else fly",
    )
    window_size: int | None = parameter(
        None,
        f"fly: the window; if not given, {', '.join(map(str, strictness.WINDOWS))} are tried",
        kind=int, low=0,
    )  # fmt: skip
    config: str | None = parameter(
        None,
        "TOML file with all that is not varied; if not given, what suits the pair that ships with "
        "the package, and else the defaults",
    )


@flag_group("Calibration")
class _CalibrateFlags(BatchFlags, _GateFlags, ProcessFlags):
    num_speculative_tokens: int | None = parameter(
        None,
        "draft tokens of a round (K); if not given, those of the config, else "
        f"{Drafting.num_speculative_tokens}",
        kind=int, low=1,
    )  # fmt: skip
    memory: str | None = parameter(None, "where the memory goes; one that was begun is continued")
    gate: str | None = parameter(None, "the config to write, a new .toml file")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("calibrate", _CalibrateFlags).parse(arguments, _HELP)
    _check_flags(values)
    if not values.has_draft:
        raise FlyJaxError(
            "--target was given without --draft, and without a draft model there is nothing to "
            "correct; give --draft."
        )
    command = shlex.join(["python", "-m", "fly_jax.launch", "calibrate", *arguments])
    try:
        with distributed_session(values):
            with joint_errors():
                if values.gate is not None and process_id() == 0:
                    strictness.check_new(Path(values.gate))
            inputs = open_inputs(values, _config(values))
            if values.gate is not None:
                _find(values, Path(values.gate), inputs, command)
            elif values.memory is not None:
                _fill(values, Path(values.memory), inputs)
    except KeyboardInterrupt as interrupt:
        what = "Go on where it was" if values.memory else "Nothing was written; begin again"
        raise KeyboardInterrupt(f"{what} with: {command}") from interrupt


def _check_flags(values: _CalibrateFlags) -> None:
    if values.prompts_file is None:
        raise FlyJaxError("calibrate needs prompts to learn from; give --prompts_file.")
    if (values.memory is None) == (values.gate is None):
        raise FlyJaxError(
            "calibrate fills a memory or finds a gate; give either --memory or --gate, with the "
            "file to write."
        )
    has_one_bound = (values.max_disagreement is None) != (values.max_regret is None)
    if values.gate is not None and not has_one_bound:
        raise FlyJaxError(
            "calibrate --gate needs one bound; give either --max_disagreement or --max_regret."
        )
    for one in parameters_of(_GateFlags):
        if values.gate is None and getattr(values, one.name) is not None:
            raise FlyJaxError(
                f"--{one.name} was given with --memory, and is about --gate alone; leave it out."
            )


def _config(values: _CalibrateFlags) -> DecodingConfig:
    """Returns how prompts are continued, with all that can be checked of it checked."""
    names = ("num_speculative_tokens", *(("rule", "window_size") if values.gate else ()))
    found = givens({name: getattr(values, name) for name in names})
    if values.gate is None:
        return DecodingConfig(rule="exact").replace(**dict(found))
    given = DecodingFlags(config=values.config, given=found)
    # Other models are decoded exactly where nothing is said, and then there is no gate.
    config = given.to_config(values if values.is_embedded else None)
    _bound(values), strictness.strictness_of(config)
    return config.replace(window_size=strictness.windows_of(config, values.window_size)[0])


def _bound(values: _CalibrateFlags) -> strictness.Bound:
    risk: strictness.Risk = "regret" if values.max_disagreement is None else "disagreement"
    most = values.max_regret if risk == "regret" else values.max_disagreement
    return strictness.Bound(risk, cast(float, most))


def _find(values: _CalibrateFlags, path: Path, inputs: Inputs, command: str) -> None:
    from fly_jax.evaluation.calibration import check_prompts, find_gate

    check_prompts(inputs.ids)
    gate = find_gate(
        load_models(values, inputs), inputs.ids, inputs.config, _bound(values),
        window_size=values.window_size, max_new_tokens=values.max_new_tokens,
        batch_size=values.batch_size,
    )  # fmt: skip
    say(gate.summary())
    if process_id() == 0:
        text = strictness.as_toml(gate.config, gate.varied, f"{command}\n\n{gate.summary()}")
        part = path.with_name(path.name + ".part")  # so that there is all of it or nothing
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    say(f"{path} says so; decode with --config {path}.")


def _fill(values: _CalibrateFlags, path: Path, inputs: Inputs) -> None:
    from fly_jax.evaluation.calibration import begin_memory, fill_memory
    from fly_jax.models.checkpoints.source import identity

    models, which = inputs.models, ""
    # Starts the backend, in all processes.
    dtype = values.dtype or models.default_dtype(inputs.mesh.size)
    with joint_errors():
        if process_id() == 0:
            # Draft models below the first one do not change a token.
            draft = models.drafter or models.self_draft or identity(models.drafts[0].path)
            which = " ".join([identity(models.target.path), draft, dtype])
    which = broadcast(which)
    ids, k, most = inputs.ids, inputs.config.drafting.max_speculative_tokens, values.max_new_tokens
    # A wrong file is refused before the weights are read.
    begin_memory(path, models.target.tokenizer.digest, ids, k, most, which)
    memory = fill_memory(
        load_models(values, inputs), ids, path, num_speculative_tokens=k, models=which,
        max_new_tokens=most, batch_size=values.batch_size,
    )  # fmt: skip
    say(f"{path} counts {len(memory)} pairs.")
