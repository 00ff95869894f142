"""No round copies a cache or a stack of matrices, and its exchanges are those that it needs.

The TPU compiler says so of slices that are not there.
"""

import jax
import pytest
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding
from rounds import BY_LIBTPU, copied, repeated, round_hlo

from fly_jax.models.llama import Llama
from fly_jax.models.presets import preset
from fly_jax.planning.hlo import exchanges
from fly_jax.planning.plan_spec import abstract_model, slice_mesh
from fly_jax.sharding.chips import CHIPS
from fly_jax.sharding.mesh import parse_mesh
from fly_jax.sharding.rules import RULES, Layout

pytestmark = BY_LIBTPU

LARGE, MIDDLE, SMALL = (f"llama-3.1-{size}" for size in ("405b", "70b", "8b"))


@pytest.mark.parametrize(("name", "target", "draft", "where"), [
    ("auto", LARGE, SMALL, "v5e 8x8"),
    ("exact", LARGE, "pard-llama-3.2-1b", "v5e 8x8"),
    ("lookup", SMALL, "pard-llama-3.2-1b", "v5e 2x2"),  # which rests where that drafts
    ("defer", "qwen-3-8b", "dspark-qwen-3-8b", "v5e 2x2"),
    ("auto", "qwen-3-8b", "eagle3-qwen-3-8b", "v5e 2x2"),
    ("head below", LARGE, f"{SMALL} eagle3-{SMALL}", "v5e 8x8"),
    # Two models that one chip holds: 8B and 1B in bfloat16 are more than that.
    ("lookup", "llama-3.2-3b", "llama-3.2-3b", "v5e 1x1"),
    ("autoregressive", MIDDLE, "", "v6e 2x4"),  # it takes more than the memory of 8 v5e
])  # fmt: skip
def test_no_copies_and_two_sums_a_layer(name: str, target: str, draft: str, where: str) -> None:
    """Of a kind of round of presets, in bfloat16 with one row."""
    (chip, mesh), given = where.split(), {"context": 8192}
    devices = slice_mesh(CHIPS[chip], parse_mesh(mesh))
    layout = Layout(devices, RULES["tensor_whole"])
    models = [abstract_model(preset(one), layout) for one in (target, *draft.split())]
    if devices.size == 1:
        lies = SingleDeviceSharding(devices.devices.flat[0])

        def alone(one: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return one.update(sharding=Format(one.format.layout, lies))

        models = [Llama(one.config, jax.tree.map(alone, one.parameters())) for one in models]
        # The compiler takes longest here: with the fewest widths that a lookup chooses from.
        given = {"context": 4096, "num_speculative_tokens": 1}
    hlo, capacity = round_hlo(name, models, rows=1, **given)
    assert not repeated(copied(hlo, models, 1, capacity))
    sent = exchanges(hlo, devices.size)
    # Passes in the program: the target's, and of a model above a head with what it then takes in.
    passes = {target: 1} | ({draft.split()[0]: 3} if name == "head below" else {})
    passes |= {draft: 1} if draft.startswith("pard") else {}
    for model, number in passes.items() if name not in ("auto", "lookup") else ():
        layers = preset(model).num_layers
        of_layers = [one.kind for one in sent if one.count == layers]
        assert of_layers == ["all-reduce"] * 2 * number, model
