"""What else would fit: by shapes, corrected by what the compiler said of the plan itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from fly_jax.models.specs import SELF_DRAFTS
from fly_jax.planning.request import Request
from fly_jax.sharding.mesh import parse_mesh

_MOST_ROWS, _CONTEXT_STEP = 4096, 1024


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """See `Plan`, whose fields these are."""

    largest_batch: int
    largest_context: int
    remedies: tuple[str, ...]


def alternatives(request: Request, peak_bytes: int) -> Alternatives:
    """The largest batch and context, and what would make a plan fit that does not.

    Args:
      request: the plan's.
      peak_bytes: that the plan takes.
    """
    counted = request.estimate(request.layouts())
    correction = peak_bytes - max(step.peak_bytes for step in counted)

    def fits(changed: Request) -> bool:
        steps = changed.estimate(changed.layouts())
        return max(step.peak_bytes for step in steps) + correction <= changed.chip.memory_bytes

    def fits_rows(rows: int) -> bool:
        return fits(dataclasses.replace(request, rows=rows))

    def fits_steps(steps: int) -> bool:
        context, prompt = _CONTEXT_STEP * steps, request.prompt_length
        prompt = None if prompt is None else min(prompt, context - 1)
        return fits(dataclasses.replace(request, context=context, prompt_length=prompt))

    most = min(request.target.max_context, request.draft.max_context)
    rows = _largest(fits_rows, _MOST_ROWS)
    context = _CONTEXT_STEP * _largest(fits_steps, most // _CONTEXT_STEP)
    if peak_bytes <= request.chip.memory_bytes:
        return Alternatives(max(rows, request.rows), max(context, request.context), ())
    return Alternatives(rows, context, tuple(_remedies(request, fits, rows, context)))


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number that fits, of 1 to `most`; 0 if none does."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _remedies(
    request: Request, fits: Callable[[Request], bool], largest_batch: int, largest_context: int
) -> Iterator[str]:
    """What would make it fit, each on its own: int8, fewer rows, less context, a larger slice."""
    is_own = request.self_draft == SELF_DRAFTS["int8"]  # which an int8 target would be itself
    if not (request.int8 or is_own) and fits(dataclasses.replace(request, int8=True)):
        yield "int8 matrices (--dtype int8)"
    if 0 < largest_batch < request.rows:
        yield f"fewer rows: {largest_batch} (--batch_size {largest_batch})"
    if 0 < largest_context < request.context:
        yield f"a context of {largest_context} (--context {largest_context})"
    for shape in request.chip.slices or ("1", "2", "4", "8"):
        sizes = shape.split("x")
        mesh = parse_mesh("x".join(sizes[:2] if len(sizes) < 3 else _merged(sizes)))
        if mesh.num_devices > request.mesh.num_devices and fits(
            dataclasses.replace(request, mesh=mesh)
        ):
            yield f"a larger slice: {mesh} (--mesh {mesh})"
            return


def _merged(sizes: list[str]) -> list[str]:
    """A cube as two axes of the mesh."""
    first, second, third = map(int, sizes)
    return [str(second * third), str(first)] if first < third else [str(first * second), str(third)]
