"""How the plugin gets into vLLM, and how it ends a start; with a stand-in for the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

from fly_jax.integrations.vllm_tpu import plugin
from fly_jax.integrations.vllm_tpu.startup import StartRefusedError

WORKER = "the engine's own"
K = 10


def config(**additional: Any) -> Any:
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=K),
        parallel_config=SimpleNamespace(worker_cls=WORKER),
    )


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """The hook by which vLLM has a platform complete its config, with the plugin registered."""
    platform = type("TpuPlatform", (), {})
    platform.check_and_update_config = staticmethod(lambda config: None)  # type: ignore[attr-defined]
    platform.validate_request = staticmethod(lambda inputs, params: None)  # type: ignore[attr-defined]
    for name in (
        "tpu_inference",
        "tpu_inference.platforms",
        "tpu_inference.platforms.tpu_platform",
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.TpuPlatform = platform  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register()
    plugin.register()  # vLLM may call it again
    return platform.check_and_update_config  # type: ignore[attr-defined, no-any-return]


def test_nothing_changes_unless_it_is_asked_for(update: Callable[[Any], None]) -> None:
    one = config()
    update(one)
    assert one.parallel_config.worker_cls == WORKER
    assert one.additional_config == {}


def test_what_is_asked_for_names_the_worker(update: Callable[[Any], None]) -> None:
    one = config(fly_jax={"any_version": True})
    update(one)
    assert one.parallel_config.worker_cls == "fly_jax.integrations.vllm_tpu.runner.Worker"


def test_a_wrong_setting_gets_through_pydantic_as_one_sentence(
    update: Callable[[Any], None],
) -> None:
    @pydantic.dataclasses.dataclass
    class Config:  # as vLLM's are
        def __post_init__(self) -> None:
            update(config(fly_jax={"any_version": True, "window_size": K}))

    with pytest.raises(StartRefusedError, match=r"^In additional_config\['fly_jax'\]: .*\.$"):
        Config()


def test_a_lookup_needs_a_draft_model_below_which_it_is(update: Callable[[Any], None]) -> None:
    with pytest.raises(StartRefusedError, match=r"method is ngram; .*speculative_config"):
        update(config(fly_jax={"any_version": True, "prompt_lookup_max": 4}))


@pytest.mark.parametrize("command", ["/bin/vllm", "/site-packages/vllm/entrypoints/cli/main.py"])
def test_vllms_command_ends_with_one_sentence_and_status_2(
    update: Callable[[Any], None],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "serve"])
    with pytest.raises(SystemExit) as end:
        update(config(fly_jax={"any_version": True, "rule": "flie"}))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm: In additional_config['fly_jax']: rule is 'flie'")
