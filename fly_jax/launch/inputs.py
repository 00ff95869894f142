"""What the commands that decode have in common: prompts, configs and models, checked and read."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fly_jax.decoding.config import DecodeConfig, load_config
from fly_jax.errors import FlyJaxError
from fly_jax.launch.prompts import Prompt, read_prompts

if TYPE_CHECKING:  # JAX is imported only when the flags are good
    from absl.flags import FlagValues

    from fly_jax.decoding.pair import Pair
    from fly_jax.models.config import LlamaConfig
    from fly_jax.models.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is known before the weights are read, the same in all processes.

    Attributes:
      target: the target's folder.
      model: its configuration.
      tokenizer: its tokenizer.
      prompts: those that fit the context; in processes other than 0 without their problems.
      ids: their tokens.
    """

    target: Path
    model: LlamaConfig
    tokenizer: Tokenizer
    prompts: list[Prompt]
    ids: list[list[int]]


def say(line: str) -> None:
    """Writes to standard error, where whatever is not a result goes, once for all processes."""
    from fly_jax.sharding.processes import process_id

    if process_id() == 0:
        print(line, file=sys.stderr, flush=True)


def prompts_of_file(values: FlagValues) -> list[Prompt]:
    """The prompts of --prompts_file; bad ones are passed over if --skip_bad_prompts says so."""
    return read_prompts(values.prompts_file, lambda error: _refuse(values, error))


def base_config(values: FlagValues) -> DecodeConfig:
    """What the flags are laid over: the file that is named, or what suits the embedded pair."""
    if values.config:
        return load_config(Path(values.config))
    if values.target is None and not values.draft:
        return load_config(Path(__file__).parents[1] / "configs" / "embedded_pair.toml")
    return DecodeConfig()


def read(values: FlagValues, config: DecodeConfig, prompts: list[Prompt]) -> Reading:
    """Checks the target's folder and the sizes, and encodes the prompts.

    Args:
      values: with the flags of models and prompts.
      config: how prompts will be decoded.
      prompts: in process 0, whose prompts all processes go on with.

    Raises:
      FlyJaxError: on every process, whatever is wrong on any of them.
    """
    from fly_jax.sharding.mesh import parse_mesh, prepare_devices
    from fly_jax.sharding.processes import check_same, process_id, share, together

    # What a file said may differ although the command is the same.
    check_same(json.loads(json.dumps(dataclasses.asdict(config))))
    prepare_devices(parse_mesh(values.mesh))  # before anything below can start a JAX backend

    from fly_jax.models.checkpoints.load import check_checkpoint
    from fly_jax.models.checkpoints.locate import embedded_pair, resolve
    from fly_jax.models.tokenizers.tokenizer import load_tokenizer

    def inspect() -> Reading:
        folder = embedded_pair()[0] if values.target is None else resolve(values.target)
        model = check_checkpoint(folder)
        _check_sizes(config, model.max_context)
        tokenizer = load_tokenizer(folder)
        encoded = _encode(values, prompts, tokenizer, model) if process_id() == 0 else ([], [])
        return Reading(folder, model, tokenizer, *encoded)

    found = together(inspect)
    texts, ids = share([[(one.text, one.source) for one in found.prompts], found.ids])
    if process_id() == 0:
        return found
    return dataclasses.replace(found, prompts=[Prompt(*one) for one in texts], ids=ids)


def load(values: FlagValues, config: DecodeConfig, reading: Reading) -> Pair:
    """Reads the weights, laid out for what is to be decoded, and says where they lie."""
    from fly_jax.decoding.decoder import CAPACITY_STEP
    from fly_jax.decoding.pair import load_pair
    from fly_jax.models.layouts import Workload
    from fly_jax.sharding.mesh import create_mesh, describe, parse_mesh

    mesh = parse_mesh(values.mesh)
    if mesh.num_devices > 1:
        say(describe(create_mesh(mesh)))
    longest = max(map(len, reading.ids)) + values.max_new_tokens
    longest = min(longest, reading.model.max_context)
    workload = Workload(
        rows=min(values.batch_size, len(reading.ids)),
        capacity=-(-longest // CAPACITY_STEP) * CAPACITY_STEP,
        num_speculative_tokens=config.most_drafted,
    )
    target = None if values.target is None else reading.target
    pair = load_pair(target, values.draft, mesh=mesh, dtype=values.dtype, workload=workload)
    for line in pair.replicated:
        say(line)
    return pair


def _refuse(values: FlagValues, error: FlyJaxError) -> None:
    """Raises the error, or only says it where bad prompts are to be skipped."""
    if not values.skip_bad_prompts:
        raise error
    say(f"Skipped: {error}")


def _check_sizes(config: DecodeConfig, context: int) -> None:
    sizes = {
        "num_speculative_tokens": config.most_drafted,
        "level_speculative_tokens": config.level_speculative_tokens,
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
