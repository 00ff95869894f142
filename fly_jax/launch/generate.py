"""The command generate: continues prompts, shows the text as it comes, and compares the rules."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fly_jax.decoding.config import DecodingConfig
from fly_jax.errors import FlyJaxError
from fly_jax.evaluation.audit_file import Run, audited, check_writable, write_prompt, write_run
from fly_jax.launch.flags import AuditFlags, Flags, RunFlags, flag_group
from fly_jax.launch.inputs import distributed_session, load_models, open_inputs, say, waiting
from fly_jax.parameters import parameter
from fly_jax.sharding.processes import broadcast, joint_errors, process_id
from fly_jax.verification.correction_memory import CorrectionMemory, load_memory

if TYPE_CHECKING:  # what loads models takes seconds to import, which a wrong flag need not wait for
    from fly_jax.decoding.config import RoundSpec
    from fly_jax.decoding.pair import Pair
    from fly_jax.engine.request import Generation
    from fly_jax.launch.inputs import Inputs, Prompt

_HELP = """\
python -m fly_jax.launch [generate] [flags]

Continues prompts with a target model and a draft model. Without --target it takes the pair that
ships with the package; without prompts it takes built-in ones and ends with a comparison.
python -m fly_jax.launch help lists the other commands.

Examples:
  python -m fly_jax.launch
  python -m fly_jax.launch --prompt "import os" --rule exact
  python -m fly_jax.launch --mesh 8x8 --prompts_file prompts.jsonl --json > answers.jsonl
  python -m fly_jax.launch --target meta-llama/Llama-3.1-8B-Instruct \\
    --draft meta-llama/Llama-3.2-1B-Instruct --prompt "Once upon a time" --compare
"""


# Figures of a generation, by its own names for them.
_COUNTED = (
    *("num_rounds", "mean_accepted_tokens", "num_draft_tokens", "num_accepted_tokens"),
    *("num_rescued_tokens", "num_rollbacks", "tokens_per_second"),
)


@flag_group("Generation")
class GenerateFlags(RunFlags, AuditFlags):
    """Flags of the command `generate`."""

    prompt: tuple[str, ...] = parameter((), "what to continue")
    compare: bool = parameter(
        False, "end with a table of autoregressive, lossless, published FLy and the chosen decoding"
    )
    update_memory: bool = parameter(
        False,
        "csd: at the end, or Ctrl-C, write what was learned to --memory, a file that may be new",
    )
    json: bool = parameter(False, "one JSON object for each prompt on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("generate", GenerateFlags).parse(arguments, _HELP)
    with distributed_session(values):
        _run(values)


def _run(values: GenerateFlags) -> None:
    has_prompts = bool(values.prompt) or values.prompts_file is not None
    compares = values.compare or (not has_prompts and values.has_draft)
    config = _config(values, compares)
    inputs = open_inputs(values, config, values.prompt)
    for one in config.side_by_side() if compares else ():
        inputs.models.check_drafting(one)
    says = values.config or values.gives("rule")
    if not (values.has_draft or says or config.num_speculative_tokens):
        say(
            "Without --draft the target decodes alone, one token at a time (rule autoregressive); "
            "--draft ngram drafts from the text itself, which stays the target's own."
        )
    memory = _memory(values, inputs) if inputs.rule.uses_memory else None
    pair = load_models(values, inputs)
    _decode(values, pair, memory, inputs)
    if compares:
        _compare(values, pair, memory, inputs)


def _config(values: GenerateFlags, compares: bool) -> DecodingConfig:
    if values.audit is None and values.audit_exact is not None:
        raise FlyJaxError("--audit_exact was given without --audit; give --audit FILE as well.")
    if values.audit is not None:
        with joint_errors():
            if process_id() == 0:
                check_writable(Path(values.audit))
    config = values.to_config(values)
    if compares and not values.proposes(config):
        raise values.without_proposals("--compare")
    config = values.proposing(config)
    for one in config.side_by_side() if compares else ():
        one.to_rule(), one.to_lookup()
    _check_memory(values, config)
    return config


def _check_memory(values: GenerateFlags, config: DecodingConfig) -> None:
    """A config may name a memory for some of its rules; who gives one on the spot means it."""
    given = {"memory": values.gives("memory"), "update_memory": values.update_memory}
    for name, is_given in given.items():
        if is_given and not config.to_rule().uses_memory:
            raise FlyJaxError(
                f"--{name} was given, and the rule {config.rule} as it is set looks nothing up in "
                f"a memory; give a rule that does, such as csd, or leave --{name} out."
            )
    if values.update_memory and (config.limits.memory is None or not config.limits.csd_online):
        missing = "--memory" if config.limits.memory is None else "--csd_online"
        raise FlyJaxError(
            f"--update_memory was given without {missing}; what is learned while decoding needs a "
            f"file to go to: give {missing} as well."
        )


def _memory(values: GenerateFlags, inputs: Inputs) -> CorrectionMemory:
    """The memory that the rule begins with, the same in all processes."""
    limits, vocabulary = inputs.config.limits, inputs.models.target.tokenizer.digest
    path = None if limits.memory is None or process_id() != 0 else Path(limits.memory)
    memory = CorrectionMemory(vocabulary, min_count=limits.csd_min_count)
    with joint_errors():
        if path is not None and not (values.update_memory and not path.exists()):
            memory = load_memory(path, vocabulary, min_count=limits.csd_min_count)
        if path is not None and values.update_memory:
            memory.save(path)  # a path that cannot be written is found before any work is done
    for draft_token, target_token, count in broadcast(memory.counts()):
        if process_id() != 0:
            memory.add([(draft_token, target_token)], count)
    return memory


def _decode(
    values: GenerateFlags, pair: Pair, memory: CorrectionMemory | None, inputs: Inputs
) -> None:
    """Continues every prompt: as text while it is produced, or as an object when it is done."""
    from fly_jax.engine.engine import Engine
    from fly_jax.launch.view import TextView

    config, ids, prompts = inputs.config, inputs.ids, inputs.prompts
    most = values.max_new_tokens
    engine = Engine.of(
        pair, config, prompts=ids, max_new_tokens=most, num_slots=values.batch_size,
        audits=values.audit is not None, memory=None if memory is None else memory.copy(),
        with_texts=not values.json,
    )  # fmt: skip
    requests = engine.requests(ids, most, seed=values.seed)
    with waiting("Compiling"):  # so that no prompt's speed has that in it
        engine.warm_up_for(requests)
    with contextlib.ExitStack() as stack:
        learned = config.limits.memory
        if values.update_memory and engine.memory is not None and learned and process_id() == 0:
            stack.callback(engine.memory.save, Path(learned))  # also where Ctrl-C ends it
        audit = None
        if values.audit is not None:
            engine.forget()  # the caches, which decoding exactly needs before
            audit = stack.enter_context(_auditing(values, values.audit, pair, engine.spec, inputs))
        states = [engine.submit(request) for request in requests]

        def ended(index: int) -> None:
            """Reports a prompt when it and all before it are complete."""
            generation = states[index].generation
            if values.json:
                print(json.dumps(_record(pair, config, prompts[index], generation)), flush=True)
            else:
                say(_summary(index + 1, len(ids), generation))
            if audit is not None:
                audit(index, generation)

        view = None if values.json else TextView(sys.stdout)
        if view is not None:
            # An answer begins on a line of its own.
            view.begin([one.text + "\n\n" * one.is_question for one in prompts])
        rows = {state: row for row, state in enumerate(states)}
        num_ended = 0
        for state, settled in engine.run(()):
            if view is not None:
                done = settled.finish_reason is not None
                view.push(rows[state], settled.texts, settled.why, done=done)
                for row in view.ended():
                    ended(row)
                continue
            while num_ended < len(states) and states[num_ended].is_finished:
                ended(num_ended)
                num_ended += 1


@contextlib.contextmanager
def _auditing(
    values: GenerateFlags, file: str, pair: Pair, spec: RoundSpec, inputs: Inputs
) -> Iterator[Callable[[int, Generation], None]]:
    """Opens the audit; yields what writes the generation of the prompt with an index."""
    from fly_jax.engine.engine import Engine

    config, ids, rule, most = inputs.config, inputs.ids, spec.rule, values.max_new_tokens
    measure = spec.static.needs(rule).entropy
    assert measure is not None
    settings = {**config.to_dict(), "max_new_tokens": most, "num_prompts": len(ids)}
    run = Run(config.rule, measure.name, settings)
    own: Sequence[Generation | None] = [None] * len(ids)
    # Unless all are decoded exactly anyhow, or drawn. Now: later the engine would wait for it.
    if values.audit_exact is not False and config.is_loosened and spec.sampling is None:
        say(f"Decoding {len(ids)} prompts exactly, to say what differs from that ...")
        # By exact speculation, which is faster than decoding without.
        lossless = Engine.of(
            pair, config.side_by_side()[1], prompts=ids, max_new_tokens=most,
            num_slots=values.batch_size, with_texts=False,
        )  # fmt: skip
        own = lossless.generate(ids, most)
        lossless.forget()
    if process_id() != 0:
        yield lambda *_: None
        return
    budget = None if rule.budget is None else float(np.max(rule.budget))
    with Path(file).open("w", encoding="utf-8") as out:
        write_run(out, run)

        def add(index: int, generation: Generation) -> None:
            found = audited(
                index, inputs.prompts[index].text, generation, pair.tokenizer, run,
                has_window=int(np.max(rule.strict_tail)) > 0, budget=budget, exact=own[index],
            )  # fmt: skip
            write_prompt(out, *found)

        yield add


def _record(
    pair: Pair, config: DecodingConfig, prompt: Prompt, generation: Generation
) -> dict[str, object]:
    risk = {} if generation.regret is None else {"regret": generation.regret}
    return {
        **({"messages": prompt.messages} if prompt.messages else {"prompt": prompt.text}),
        "prompt_token_ids": list(generation.prompt_token_ids), "token_ids": generation.token_ids,
        "text": pair.tokenizer.decode(generation.token_ids, continues=True),
        "finish_reason": generation.finish_reason, "rule": config.rule,
        **{name: getattr(generation, name) for name in _COUNTED},
        "why": "".join(why.letter for why in generation.why), **risk,
    }  # fmt: skip


def _summary(number: int, total: int, generation: Generation) -> str:
    risk = "" if generation.regret is None else f", regret {generation.regret:.2f} nats"
    rounds, s = generation.num_rounds, "s" * (generation.num_rounds != 1)
    return (
        f"[{number}/{total}] {len(generation.token_ids)} tokens in {rounds} round{s} "
        f"({generation.finish_reason}): {generation.mean_accepted_tokens:.2f} mean accepted "
        f"tokens, {generation.num_rescued_tokens} rescued{risk}, "
        f"{generation.tokens_per_second:.0f} tokens/s"
    )


def _compare(
    values: GenerateFlags, pair: Pair, memory: CorrectionMemory | None, inputs: Inputs
) -> None:
    from fly_jax.evaluation.compare import compare
    from fly_jax.evaluation.problems import is_correct

    def check(index: int, text: str) -> bool | None:
        problem = inputs.prompts[index].problem
        # Other models know nothing of how a problem of ours is to be answered.
        return None if problem is None or values.target else is_correct(problem, text)

    say(f"Comparing the rules on {len(inputs.ids)} prompts, {values.batch_size} at a time ...")
    configs = inputs.config.side_by_side()
    rules = {f"{one.rule} (K = {one.num_speculative_tokens})": one for one in configs}
    comparison = compare(
        pair, inputs.ids, rules, max_new_tokens=values.max_new_tokens,
        batch_size=values.batch_size, seed=values.seed, check=check, memory=memory,
    )  # fmt: skip
    (say if values.json else print)(comparison.table())
