"""The command generate: continues prompts, shows the text as it comes, and compares the rules."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fly_jax.decoding.config import DecodeConfig, load_config
from fly_jax.errors import FlyJaxError
from fly_jax.launch.auditing import Auditor, add_audit_flags, auditing, check_audit
from fly_jax.launch.flags import Flags, add_decoding_flags, decoding_overrides
from fly_jax.launch.joining import add_process_flags, joined
from fly_jax.launch.prompts import Prompt, built_in_prompts, prompts_from_flags, read_prompts

if TYPE_CHECKING:  # JAX is imported only when the flags are good
    from absl.flags import FlagValues

    from fly_jax.decoding.decoder import Decoder, Generation, Settled
    from fly_jax.decoding.memory import CorrectionMemory
    from fly_jax.decoding.pair import Pair
    from fly_jax.decoding.round import RoundSpec
    from fly_jax.models.config import LlamaConfig
    from fly_jax.models.tokenizer import Tokenizer

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

{flags}
"""


def main(arguments: Sequence[str]) -> None:
    """Runs the command.

    Raises:
      FlyJaxError: anything wrong with the flags, the files, the prompts or the models.
    """
    flags = _flags()
    values = flags.parse(arguments)
    if values.help:
        print(_HELP.format(flags=flags.help()))
        return
    with joined(values):
        _run(values)


def _run(values: FlagValues) -> None:
    """What each process does. Only the first one reads prompts and is heard."""
    from fly_jax.sharding.processes import together

    compares = values.compare or (not _has_prompts(values) and _has_draft(values))
    together(lambda: check_audit(values))
    config, prompts = together(lambda: (_config(values, compares), _prompts(values)))
    pair, memory, prompts, ids = _load(values, config, prompts)
    _generate(values, config, pair, memory, prompts, ids)
    if compares:
        _compare(values, config, pair, memory, prompts, ids)


def _config(values: FlagValues, compares: bool) -> DecodeConfig:
    config = dataclasses.replace(_base_config(values), **decoding_overrides(values))
    if not _has_draft(values) and (config.num_drafted or compares):
        wanted = "--compare" if compares else f"the rule {config.rule}"
        raise FlyJaxError(
            f"--target was given without --draft, and {wanted} needs a draft model; give --draft, "
            "or --rule autoregressive to decode with the target alone."
        )
    for one in config.side_by_side() if compares else (config,):
        one.to_rule(), one.to_lookup()
    return config


def _base_config(values: FlagValues) -> DecodeConfig:
    """What the flags are laid over: the file that is named, or what suits the embedded pair."""
    if values.config:
        return load_config(Path(values.config))
    if values.target is None and values.draft is None:
        return load_config(Path(__file__).parents[1] / "configs" / "embedded_pair.toml")
    return DecodeConfig()


def _flags() -> Flags:
    flags = Flags("generate")
    group = "Models"
    flags.string(group, "target", None, "folder or hub id of the model whose text is wanted")
    flags.string(group, "draft", None, "folder or hub id of the model that proposes")
    flags.string(
        group, "mesh", "1x1",
        "devices along each axis, such as 8x8; a machine without accelerators simulates them",
    )  # fmt: skip
    flags.choice(
        group, "dtype", None, ("float32", "bfloat16", "int8"),
        "type of weights and caches; if not given, float32 for the pair that ships with the "
        "package and bfloat16 for others; int8 is for matrices, with bfloat16 for the rest",
    )  # fmt: skip
    group = "Prompts"
    flags.strings(group, "prompt", "what to continue; may be given several times")
    flags.string(
        group, "prompts_file", None,
        "a prompt on each line, as plain text or as a JSON object with prompt; - is standard input",
    )  # fmt: skip
    flags.boolean(group, "skip_bad_prompts", "warn of a bad line in the file and go on")
    flags.integer(group, "max_new_tokens", 128, "most tokens to add to a prompt", lower_bound=1)
    flags.integer(group, "batch_size", 1, "prompts decoded together", lower_bound=1)
    add_decoding_flags(flags)
    add_audit_flags(flags)
    add_process_flags(flags)
    group = "Output"
    flags.boolean(
        group, "compare",
        "end with a table of autoregressive, lossless speculative and FLy decoding on the prompts",
    )  # fmt: skip
    flags.boolean(group, "json", "one JSON object for each prompt on standard output")
    flags.boolean(group, "help", "show this")
    return flags


def _has_prompts(values: FlagValues) -> bool:
    return bool(values.prompt) or values.prompts_file is not None


def _has_draft(values: FlagValues) -> bool:
    return values.target is None or values.draft is not None


def _say(line: str) -> None:
    """Writes to standard error, where whatever is not a result goes, once for all processes."""
    from fly_jax.sharding.processes import process_id

    if process_id() == 0:
        print(line, file=sys.stderr, flush=True)


def _refuse(values: FlagValues, error: FlyJaxError) -> None:
    """Raises the error, or only says it where bad prompts are to be skipped."""
    if not values.skip_bad_prompts:
        raise error
    _say(f"Skipped: {error}")


def _prompts(values: FlagValues) -> list[Prompt]:
    """The prompts, in process 0; the others are told which tokens there are to go on from."""
    from fly_jax.sharding.processes import process_id

    if process_id() != 0:
        return []
    if not _has_prompts(values):
        return built_in_prompts()
    prompts = prompts_from_flags(values.prompt)
    if values.prompts_file is not None:
        prompts += read_prompts(values.prompts_file, lambda error: _refuse(values, error))
    return prompts


def _load(
    values: FlagValues, config: DecodeConfig, prompts: list[Prompt]
) -> tuple[Pair, CorrectionMemory | None, list[Prompt], list[list[int]]]:
    """The pair, the rule's memory, and the prompts that fit the context with their tokens."""
    from fly_jax.sharding.mesh import create_mesh, describe, parse_mesh, prepare_devices
    from fly_jax.sharding.processes import process_id, share, together

    mesh = parse_mesh(values.mesh)
    prepare_devices(mesh)  # before anything below can start a JAX backend

    from fly_jax.decoding.decoder import CAPACITY_STEP
    from fly_jax.decoding.pair import load_pair
    from fly_jax.models.checkpoint import check_checkpoint
    from fly_jax.models.layouts import Workload
    from fly_jax.models.loading import embedded_pair, resolve
    from fly_jax.models.tokenizer import load_tokenizer

    def inspect() -> tuple[
        Path, CorrectionMemory | None, LlamaConfig, list[Prompt], list[list[int]]
    ]:
        folder = embedded_pair()[0] if values.target is None else resolve(values.target)
        model = check_checkpoint(folder)
        _check_sizes(config, model.max_context)
        tokenizer = load_tokenizer(folder)
        memory = _memory(config, tokenizer)
        encoded = _encode(values, prompts, tokenizer, model) if process_id() == 0 else ([], [])
        return folder, memory, model, *encoded

    folder, memory, model, fitting, ids = together(inspect)
    shared = share([[(prompt.text, prompt.source) for prompt in fitting], ids])
    if process_id() != 0:
        fitting, ids = [Prompt(*prompt) for prompt in shared[0]], shared[1]
    if mesh.num_devices > 1:
        _say(describe(create_mesh(mesh)))
    longest = min(max(map(len, ids)) + values.max_new_tokens, model.max_context)
    workload = Workload(
        rows=min(values.batch_size, len(ids)),
        capacity=-(-longest // CAPACITY_STEP) * CAPACITY_STEP,
        num_speculative_tokens=config.most_drafted,
    )
    target = None if values.target is None else folder
    pair = load_pair(target, values.draft, mesh=mesh, dtype=values.dtype, workload=workload)
    for line in pair.replicated:
        _say(line)
    return pair, memory, fitting, ids


def _memory(config: DecodeConfig, tokenizer: Tokenizer) -> CorrectionMemory | None:
    """What the rule begins with: the file that is named, or nothing counted yet."""
    from fly_jax.decoding.memory import CorrectionMemory, load_memory

    if not config.to_rule().uses_memory:
        return None
    if config.memory is None:
        return CorrectionMemory(tokenizer.digest, min_count=config.csd_min_count)
    return load_memory(Path(config.memory), tokenizer.digest, min_count=config.csd_min_count)


def _check_sizes(config: DecodeConfig, context: int) -> None:
    sizes = {
        "num_speculative_tokens": config.most_drafted,
        "prompt_lookup_max": config.prompt_lookup_max,
        "prompt_lookup_tokens": config.prompt_lookup_tokens,
    }
    for name, size in sizes.items():
        if size >= context:
            raise FlyJaxError(
                f"{name} is {size} and the model's context is {context}; give a smaller number."
            )


def _encode(
    values: FlagValues, prompts: list[Prompt], tokenizer: Tokenizer, model: LlamaConfig
) -> tuple[list[Prompt], list[list[int]]]:
    from fly_jax.decoding.decoder import check_prompt

    fitting: list[tuple[Prompt, list[int]]] = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text)
        try:
            check_prompt(ids, model, name=prompt.source)
        except FlyJaxError as error:
            _refuse(values, error)
        else:
            fitting.append((prompt, ids))
    if not fitting:
        raise FlyJaxError("No prompt is left; give at least one that fits the model's context.")
    return [prompt for prompt, _ in fitting], [ids for _, ids in fitting]


def _generate(
    values: FlagValues,
    config: DecodeConfig,
    pair: Pair,
    memory: CorrectionMemory | None,
    prompts: list[Prompt],
    ids: list[list[int]],
) -> None:
    """Continues every prompt: as text while it is produced, or as an object when it is done."""
    from fly_jax.decoding.decoder import capacity_for
    from fly_jax.launch.view import TextView, legend, wants_colour

    spec = _spec(pair, config, audits=values.audit is not None)
    capacity = capacity_for(spec, ids, values.max_new_tokens, pair.target.config.max_context)
    decoder = pair.decoder(
        spec,
        capacity=capacity,
        batch_size=min(values.batch_size, len(ids)),
        protect=config.protect,
        memory=None if memory is None else memory.copy(),
    )
    decoder.warm_up(ids[:1])  # so that no prompt's speed has the compilation in it
    texts = [prompt.text for prompt in prompts]
    with auditing(values, config, pair, decoder, texts, ids) as auditor:
        if values.json:
            for index, account in enumerate(_in_order(values, decoder, ids, auditor)):
                print(json.dumps(_record(pair, config, texts[index], account)), flush=True)
            return
        if wants_colour(sys.stdout):
            print(legend(), end="\n\n")
        view = TextView(sys.stdout, pair.tokenizer)
        for first in range(0, len(ids), decoder.batch_size):
            view.begin(texts[first : first + decoder.batch_size])
            finished: dict[int, Generation] = {}
            for settled, account in _stream(values, decoder, ids, first, auditor):
                done = bool(settled.finish_reason)
                view.push(settled.row, settled.token_ids, settled.why, done=done)
                if done:
                    finished[settled.row] = account
            for row in sorted(finished):
                _say(_summary(first + row + 1, len(ids), finished[row]))


def _stream(
    values: FlagValues,
    decoder: Decoder,
    ids: list[list[int]],
    first: int,
    auditor: Auditor | None,
) -> Iterator[tuple[Settled, Generation]]:
    """The tokens of the batch that begins at `first`; once all are there they are audited."""
    batch = ids[first : first + decoder.batch_size]
    finished: dict[int, Generation] = {}
    for settled, account in decoder.stream(batch, values.max_new_tokens, seed=values.seed + first):
        if settled.finish_reason:
            finished[settled.row] = account
        yield settled, account
    if auditor is not None:
        auditor.add(first, finished)


def _spec(pair: Pair, config: DecodeConfig, *, audits: bool = False) -> RoundSpec:
    return pair.spec(
        config.to_rule(),
        config.num_drafted,
        config.to_lookup(),
        learns=config.csd_online,
        audits=audits,
        boundary=config.round_boundary,
    )


def _in_order(
    values: FlagValues, decoder: Decoder, ids: list[list[int]], auditor: Auditor | None
) -> Iterator[Generation]:
    """Each prompt's account as soon as it and those before it are done."""
    for first in range(0, len(ids), decoder.batch_size):
        finished: dict[int, Generation] = {}
        given = 0
        for settled, account in _stream(values, decoder, ids, first, auditor):
            if settled.finish_reason:
                finished[settled.row] = account
            while given in finished:
                yield finished[given]
                given += 1


def _record(
    pair: Pair, config: DecodeConfig, prompt: str, account: Generation
) -> dict[str, object]:
    risk = {} if account.regret is None else {"regret": account.regret}
    return {
        "prompt": prompt,
        "prompt_token_ids": list(account.prompt_token_ids),
        "token_ids": account.token_ids,
        "text": pair.tokenizer.decode(account.token_ids),
        "finish_reason": account.finish_reason,
        "rule": config.rule,
        "num_rounds": account.num_rounds,
        "mean_accepted_tokens": account.mean_accepted_tokens,
        "num_draft_tokens": account.num_draft_tokens,
        "num_accepted_tokens": account.num_accepted_tokens,
        "num_rescued_tokens": account.num_rescued_tokens,
        "tokens_per_second": account.tokens_per_second,
        "why": "".join(why.letter for why in account.why),
        **risk,
    }


def _summary(number: int, total: int, account: Generation) -> str:
    risk = "" if account.regret is None else f", regret {account.regret:.2f} nats"
    return (
        f"[{number}/{total}] {len(account.token_ids)} tokens in {account.num_rounds} rounds "
        f"({account.finish_reason}): {account.mean_accepted_tokens:.2f} mean accepted tokens, "
        f"{account.num_rescued_tokens} rescued{risk}, {account.tokens_per_second:.0f} tokens/s"
    )


def _compare(
    values: FlagValues,
    config: DecodeConfig,
    pair: Pair,
    memory: CorrectionMemory | None,
    prompts: list[Prompt],
    ids: list[list[int]],
) -> None:
    """Ends with the table of the three rules."""
    from fly_jax.evaluation.compare import compare
    from fly_jax.training.problems import is_correct

    def check(index: int, text: str) -> bool | None:
        problem = prompts[index].problem
        # Other models know nothing of how a problem of ours is to be answered.
        return None if problem is None or values.target else is_correct(problem, text)

    _say(f"Comparing the rules on {len(ids)} prompts, {values.batch_size} at a time ...")
    comparison = compare(
        pair,
        ids,
        {f"{one.rule} (K = {one.num_drafted})": _spec(pair, one) for one in config.side_by_side()},
        max_new_tokens=values.max_new_tokens,
        batch_size=values.batch_size,
        seed=values.seed,
        check=check,
        protect=config.protect,
        memory=memory,
    )
    print(comparison.table(), file=sys.stderr if values.json else sys.stdout, flush=True)
