"""The plugin for vLLM: its settings, how it gets in, and how a wrong setting ends a start.

And which rule, sampling and budget each row of a step has.
"""

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
import pydantic
import pytest

from fly_jax import Budget, Exact, Fly, FlyJaxError, Margin, Sampling, per_row
from fly_jax.integrations.vllm_tpu import hooks, plugin, startup
from fly_jax.integrations.vllm_tpu.row_rules import RowRules, sampling_of
from fly_jax.integrations.vllm_tpu.startup import StartRefusedError, asked_for, decoding_config


def test_what_is_asked_for_and_by_which_names() -> None:
    assert asked_for(None, {}) is None
    assert asked_for(None, {"FLY_JAX_WINDOW_SIZE": "3", "FLY_JAX_COMPILATION_CACHE": "off"}) is None
    assert asked_for({}, {}) == {}
    assert decoding_config({}, 15).to_rule() == Fly()
    # Environment variables have the same names.
    given = {
        "rule": "fly | margin", "entropy_threshold": "0.25", "window_size": "3",
        "risk_budget": "2", "protect": r"\d", "any_version": "true",
    }  # fmt: skip
    environment = {f"FLY_JAX_{name.upper()}": value for name, value in given.items()}
    asked = asked_for(None, environment)
    assert asked["any_version"] is True
    config = decoding_config(asked, 10)
    assert config.to_rule() == Budget(Fly(0.25, 3) | Margin(), 2)
    assert config.limits.protect == (r"\d",)
    for name in ("window_size", "fly_window_size"):
        assert asked_for({name: 4}, environment)["window_size"] == 4
    # And vLLM's names of FLy's numbers are ours.
    given = {
        "rejection_sample_method": "fly", "fly_window_size": 4,
        "fly_entropy_threshold": 0.5, "fly_entropy_top_k": 5,
    }  # fmt: skip
    config = decoding_config(asked_for(given, {}) or {}, 15)
    assert config.to_rule() == Fly(0.5, 4, entropy_top_k=5)
    assert startup.request_rule(config, {"fly_window_size": 3}, 0.0) == Fly(0.5, 3, entropy_top_k=5)


@pytest.mark.parametrize(("given", "words"), [
    ({"rule": "flie"}, "no rule 'flie'"),
    ({"window_size": 15}, "draft at least 16 tokens"), ({"entropy_threshold": "high"}, "a number"),
    ({"num_speculative_tokens": 5}, "unknown"), ({"fly_entropy_top_k": 0}, "entropy_top_k is 0"),
    ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "correct the two"),
    ({"prompt_lookup_earlier": 9}, "keeps no earlier answers"),
    ("fly", "give an object"), ({"window_size": 3, "fly_window_size": 4}, "window_size is 3 and 4"),
])  # fmt: skip
def test_a_wrong_setting_is_one_sentence(given: Any, words: str) -> None:
    with pytest.raises(FlyJaxError, match=words) as error:
        decoding_config(asked_for(given, {}) or {}, 15)
    assert "additional_config" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_request_may_have_other_numbers_or_decode_exactly() -> None:
    config = decoding_config({"rule": "fly"}, 15)
    assert startup.request_rule(config, None, 0.0) == Fly()
    assert startup.request_rule(config, {"rule": "exact"}, 0.0) == Exact()
    for given in ({"entropy_threshold": 0.7}, '{"entropy_threshold": 0.7}'):
        assert startup.request_rule(config, given, 1.0) == Fly(0.7)
    for override, words in (
        ({"rule": "margin"}, "other conditions"), ({"fly_entropy_top_k": 4}, "different entropies"),
        ({"risk_budget": 1.0}, "other conditions"), ({3: 4, "rule": "fly"}, "no rule can be made"),
        ({"window_size": 15}, "draft at least 16"), ({"rule": 3}, "no rule can be made|rule"),
        ({"window_size": 2**31 - 1}, "window_size is 2147483647"), ({"protect": ["x"]}, "unknown"),
        ({"entropy_threshold": 10**400}, "entropy_threshold is 1000"), ("exact", "give an object"),
        ({"entropy_threshold": [1]}, "entropy_threshold"),
    ):  # fmt: skip
        with pytest.raises(FlyJaxError, match=words):
            startup.request_rule(config, override, 0.0)
    csd = decoding_config({"rule": "csd | fly"}, 15)  # with which sampling ones decode exactly
    assert startup.request_rule(csd, None, 0.7) == Exact()
    assert startup.request_rule(csd, None, 0.0) == csd.to_rule()


Update = Callable[[Any], None]
WORKER = "the engine's own"
K = 10


def config(**additional: Any) -> Any:
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=K),
        parallel_config=SimpleNamespace(worker_cls=WORKER),
    )


def stub(monkeypatch: pytest.MonkeyPatch, engine: str, without: str = "") -> Any:
    """The engine's modules, under a name, with all that is looked for or all but one."""
    monkeypatch.setitem(sys.modules, "tpu_inference", None)  # if it is installed
    modules = [["", *module.split(".")] for module in hooks.HOOKS]
    for path in {engine + end for one in modules for end in accumulate(one, "{}.{}".format)}:
        made = ModuleType(path)
        made.__spec__ = ModuleSpec(path, None)
        monkeypatch.setitem(sys.modules, path, made)
    for module, names in hooks.HOOKS.items():
        for name in names.split():
            if name != without:
                kind, _, part = name.partition(".")
                found = vars(sys.modules[f"{engine}.{module}"]).setdefault(kind, type(kind, (), {}))
                setattr(found, part or "_", staticmethod(lambda *_: None))
    return sys.modules[f"{engine}.{hooks.PLATFORM}"]


@pytest.fixture(params=list(hooks.PACKAGES))
def update(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Update:
    """The hook by which vLLM has a platform complete its config, with the plugin registered."""
    module = stub(monkeypatch, request.param)
    plugin.register()
    plugin.register()  # vLLM may call it again
    found: Update = module.TpuPlatform.check_and_update_config
    return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What vLLM would show."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.fly_jax")
    return caplog


def test_a_sentence_says_under_which_name_the_engine_was_found(update: Update, log: Any) -> None:
    engine, (other,) = hooks.root(), set(hooks.PACKAGES) - {hooks.root()}
    update(config(fly_jax={"any_version": True}))
    assert f"found as {engine} ({hooks.PACKAGES[engine][0]} " in log.text
    assert f"not as {other}, with all that fly_jax needs" in log.text
    assert f"tried with {hooks.TRIED}." in log.text


def test_versions_that_were_never_tried_are_refused(
    update: Update, log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0.1")
    told = f"tried with {hooks.TRIED}; install those.*any_version"
    with pytest.raises(StartRefusedError, match=told):
        update(config(fly_jax={}))
    assert not log.records


@pytest.mark.parametrize("missing", ["TPUModelRunner.capture_model", "AttentionMetadata"])
def test_what_the_engine_lacks_is_named_before_it_starts(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = stub(monkeypatch, "vllm_jax", without=missing)
    plugin.register()
    with pytest.raises(StartRefusedError, match=rf"^vllm_jax \(.*\) has no \S+:{missing}, which"):
        module.TpuPlatform.check_and_update_config(config(fly_jax={"any_version": True}))


@pytest.mark.parametrize("named", [(2, 15, 29), None])
def test_a_head_of_speculators_is_loaded_and_has_the_layers_that_it_names(
    named: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(monkeypatch, "tpu_inference")
    llama = hooks.hook("models.jax.llama3:LlamaModel")
    loader = hooks.hook("models.jax.llama_eagle3:EagleLlama3WeightLoader")
    seen: dict[str, str] = {}
    llama.get_eagle3_aux_hidden_state_layers = choose = lambda self: "its own"
    loader.load_weights = load = lambda self, model, mappings: seen.update(mappings)
    given = {"midlayer.mlp.up_proj": "model.layers.0.mlp.up_proj.kernel", "fc": "model.fc.kernel"}
    with hooks.head_as_written(SimpleNamespace(eagle_aux_hidden_state_layer_ids=named)):
        loader().load_weights("model", given)
        assert llama().get_eagle3_aux_hidden_state_layers() == (named or "its own")
    # The engine writes the layer's number in place of the star, on both sides.
    assert seen == given | {"layers.*.mlp.up_proj": "model.layers.*.mlp.up_proj.kernel"}
    assert llama.get_eagle3_aux_hidden_state_layers is choose
    assert loader.load_weights is load
    with pytest.raises(ValueError, match="broken"), hooks.head_as_written(None):
        raise ValueError("broken")
    assert loader.load_weights is load


SAID = {"vllm_torchtpu": "sampler of its own", "vllm_jax": "tpu_platform:TpuPlatform, which"}


@pytest.mark.parametrize("found", [*SAID, None])
def test_without_a_platform_it_does_nothing_and_says_why(
    found: str | None, monkeypatch: pytest.MonkeyPatch, log: Any
) -> None:
    monkeypatch.setitem(sys.modules, "tpu_inference", None)
    if found is not None:
        del stub(monkeypatch, found).TpuPlatform
    plugin.register()
    assert SAID.get(found, "") in log.text
    assert bool(log.records) == (found is not None)


def test_the_worker_changes_where_it_is_asked_for(update: Update) -> None:
    nothing, something = config(), config(fly_jax={"any_version": True})
    update(nothing)
    update(something)
    assert (nothing.parallel_config.worker_cls, nothing.additional_config) == (WORKER, {})
    assert something.parallel_config.worker_cls == "fly_jax.integrations.vllm_tpu.runner.Worker"


def test_a_wrong_setting_gets_through_pydantic_as_one_sentence(update: Update) -> None:
    @pydantic.dataclasses.dataclass
    class Config:  # as vLLM's are
        def __post_init__(self) -> None:
            update(config(fly_jax={"any_version": True, "window_size": K}))

    with pytest.raises(StartRefusedError, match=r"^In additional_config\['fly_jax'\]: .*\.$"):
        Config()


def test_a_wrong_environment_variable_is_named(update: Update, monkeypatch: Any) -> None:
    monkeypatch.setenv("FLY_JAX_RULE", "flie")
    monkeypatch.setenv("FLY_JAX_ANY_VERSION", "true")
    words = r"^In additional_config\['fly_jax'\] or FLY_JAX_RULE or FLY_JAX_ANY_VERSION: rule is"
    with pytest.raises(StartRefusedError, match=words):
        update(config())


def test_a_lookup_needs_a_draft_model_below_which_it_is(update: Update) -> None:
    with pytest.raises(StartRefusedError, match=r"method is ngram; .*speculative_config"):
        update(config(fly_jax={"any_version": True, "prompt_lookup_max": 4}))


@pytest.mark.parametrize("command", ["/bin/vllm", "/site-packages/vllm/entrypoints/cli/main.py"])
def test_vllms_command_ends_with_one_sentence_and_status_2(
    update: Update, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [command, "serve"])
    with pytest.raises(SystemExit) as end:
        update(config(fly_jax={"any_version": True, "rule": "flie"}))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm: In additional_config['fly_jax']: rule is 'flie'")


def same(left: Any, right: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, left, right)))


def test_a_request_that_is_greedy_to_the_engine_has_temperature_0() -> None:
    found = sampling_of(np.float32([-1, 0.8]), np.int32([-1, 4]), np.float32([1, 0.9]))
    assert same(found, Sampling(np.array([0, 0.8], np.float32), np.array([0, 4]), found.top_p))


ASKED = {"b": {"rule": "exact"}, "c": {"entropy_threshold": 0.9}, "d": {"rule": "margin"}}


def parameters(name: str) -> Any:
    asked = {"fly_jax": ASKED[name]} if name in ASKED else None
    return SimpleNamespace(extra_args=asked, temperature=0.0)


def test_each_row_has_its_requests_rule(caplog: pytest.LogCaptureFixture) -> None:
    rows = RowRules(decoding_config({"rule": "fly"}, 15), 8)
    step = rows.step(["c", "b", "a", None], "abc", parameters)
    assert same(step.rule, per_row([Fly(0.9), Exact(), Fly(), Fly()], like=[Fly()]))
    moved = rows.step([None, "a", "c"], "ac", parameters)
    assert same(moved.rule, per_row([Fly(), Fly(), Fly(0.9)], like=[Fly()]))
    # The program is the same whoever is in it, and when nobody is.
    assert jax.tree.structure(rows.padding(3)) == jax.tree.structure(moved)
    assert not caplog.text
    assert same(rows.step(["d"], "d", parameters).rule, per_row([Exact()], like=[Fly()]))
    assert "Request d is decoded with the rule exact" in caplog.text


def test_a_budget_stays_with_its_request() -> None:
    rows = RowRules(decoding_config({"rule": "fly", "risk_budget": 1.0}, 15), 2)
    first = rows.step(["a", None, "b"], "ab", parameters)
    assert first.is_new.tolist() == [True, False, True]
    assert sorted(first.slots[[0, 2]]) == [0, 1]
    assert first.slots[1] == rows.num_slots
    # "a" waits while "b" is decoded; "c" finds no slot, until "b" is done.
    second = rows.step(["c", "b"], "abc", parameters)
    assert second.slots.tolist() == [rows.num_slots, first.slots[2]]
    assert second.is_new.tolist() == [True, False]
    third = rows.step(["a", "b"], "ab", parameters)
    assert third.slots.tolist() == first.slots[[0, 2]].tolist()
    assert not third.is_new.any()
    last = rows.step(["c", "a"], "ac", parameters)
    assert last.slots.tolist() == first.slots[[2, 0]].tolist()
