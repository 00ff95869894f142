"""What docs/integrations.md says that can be tried without another engine."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from fly_jax.integrations.vllm_tpu.startup import asked_for, decoding_config, known

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_a_loop_of_ones_own_runs() -> None:
    (block,) = [text for kind, text in BLOCKS if kind == "python" and "fly_jax.verify" in text]
    names: dict[str, object] = {}
    exec(block, names)
    assert names["emitted"]


def test_settings_are_those_that_there_are() -> None:
    table = PAGE[PAGE.index("| setting |") : PAGE.index("It works with every method")]
    named = {
        name
        for row in table.strip().splitlines()[2:]
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert {"rule", "protect", "any_version", "risk_budget"} <= named
    assert named <= known().keys()


def test_what_the_commands_ask_for_can_be_had() -> None:
    (server,) = [text for kind, text in BLOCKS if kind == "bash"]
    texts = dict(re.findall(r"--(\S+)-config '(.*)'", server))
    speculative, additional = json.loads(texts["speculative"]), json.loads(texts["additional"])
    asked = asked_for(additional["fly_jax"], {})
    assert asked is not None
    assert decoding_config(asked, speculative["num_speculative_tokens"]).rule == "fly"
    (offline,) = [text for kind, text in BLOCKS if kind == "python" and "vllm" in text]
    ast.parse(offline)


def test_files_that_are_named_are_there() -> None:
    for name in re.findall(r"\]\(((?:\.\./)?[\w/]+\.\w+)", PAGE):
        assert (ROOT / "docs" / name).exists(), name
