"""The keys of a memory of corrections on the devices, exchanged when they have become others."""

from __future__ import annotations

from jaxtyping import Array, Int32

from fly_jax.decoding.programs import Programs
from fly_jax.decoding.spec import RoundSpec
from fly_jax.errors import FlyJaxError
from fly_jax.verification.correction_memory import CorrectionMemory


class MemoryKeys:
    """What the rounds look mismatches up in."""

    def __init__(self, programs: Programs) -> None:
        """Nothing is on the devices yet."""
        self._programs = programs
        self._known: tuple[CorrectionMemory, int] | None = None
        self._keys: Int32[Array, "pairs 2"] | None = None

    def of(self, memory: CorrectionMemory) -> Int32[Array, "pairs 2"]:
        """The keys as they are now; see `CorrectionMemory.keys`."""
        known = (memory, memory.version)
        if self._keys is None or known != self._known:
            self._keys = self._programs.put(memory.keys(), (None, None))
            self._known = known
        return self._keys


def check_memory(spec: RoundSpec, memory: CorrectionMemory | None) -> None:
    """Raises FlyJaxError for rounds that need a memory, without one."""
    if memory is None and (spec.rule.uses_memory or spec.reports_mismatches):
        raise FlyJaxError(
            "This rule looks mismatches up in a memory, or is to teach one, and none was "
            "given; pass memory=CorrectionMemory(…), empty or filled."
        )
