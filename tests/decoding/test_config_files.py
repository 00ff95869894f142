import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_types import Patch
from refusals import assert_refused, sentence

import fly_jax
from fly_jax import Budget, Csd, DecodingConfig, Exact, Fly, Lookup, Margin, Sampling, load_config
from fly_jax.decoding.config import decoding_parameters, from_reference_json, parameter_groups
from fly_jax.launch.flags import DecodingFlags, Flags
from fly_jax.verification.rules import RULES, Rule

Values = dict[str, Any]
CONFIGS = Path(__file__).parents[2] / "configs"
MARGIN = {"rule": "margin", "window_size": 3, "risk_budget": 2}
OF_MARGIN = {"exact": Exact(), "fly": Fly(), "margin": Margin()}
PUBLISHED: Values = json.loads((CONFIGS / "fly_reference.json").read_text())


@pytest.mark.parametrize(("values", "rule", "more"), [
    ({}, Fly(), ()), ({"rule": "exact", "risk_budget": 8, "protect": ["a+", "\\d"]}, Exact(), ()),
    ({"rule": "exact"}, Exact(), ()), ({"rule": "csd", "csd_consistency": 0}, Csd(0), ()),
    ({"rule": "exact", "prompt_lookup_max": 4}, Exact(), (None, Lookup(4, 1, 6, "latest"))),
    ({"rule": "sampled"}, Exact(), (Sampling(),)), ({"rule": " ( fly)"}, Fly(), ()),
    ({"rule": "sampled", "temperature": 0.5, "top_k": 7}, Exact(), (Sampling(0.5, 7),)),
    ({"temperature": 1, "top_p": 0.9}, Fly(), (Sampling(1, None, 0.9),)),
    ({"rule": "autoregressive", "prompt_lookup_max": 4}, Exact(), ()),
    ({"rule": "autoregressive", "temperature": 0.7}, Exact(), (Sampling(0.7),)),
    ({"entropy_threshold": 0.1, "window_size": 2}, Fly(0.1, 2), ()),
    ({"entropy": "full", "entropy_top_k": 5}, Fly(entropy="full", entropy_top_k=5), ()),
    ({"rule": "csd", "csd_consistency": 0.1, "csd_memory": False}, Csd(0.1, memory=False), ()),
    ({"rule": "lossy", "lossy_threshold": 0.2}, fly_jax.Lossy(0.2), ()),
    ({"rule": "lenience", "lenience": 0.7}, fly_jax.Lenience(0.7), ()),
    ({"rule": "lenience", "temperature": 1}, fly_jax.Lenience(0.5), (Sampling(1),)),
    ({"rule": "typical", "typical_epsilon": 0.1}, fly_jax.Typical(0.1), ()),
    ({"rule": "typical", "typical_delta": 0.2}, fly_jax.Typical(delta=0.2), ()),
    ({"rule": "fly & margin | csd"}, Fly() & Margin() | Csd(), ()),
    ({"rule": "fly & (margin | csd)"}, Fly() & (Margin() | Csd()), ()),
    ({"rule": "fly | csd", "risk_budget": 8}, Budget(Fly() | Csd(), 8), ()),
])  # fmt: skip
def test_rules_samplings_and_lookups(values: Values, rule: object, more: tuple[Any, ...]) -> None:
    """None of what a case does not name."""
    config, expected = DecodingConfig(**values), (rule, *more, None, None)[:3]
    assert (config.to_rule(), config.to_sampling(), config.to_lookup()) == expected
    assert config.num_speculative_tokens == (0 if config.rule == "autoregressive" else 15)


def test_the_embedded_pair_has_a_k_for_each_rule() -> None:
    config = load_config(CONFIGS / "embedded_pair.toml")
    assert config.to_rule() == Margin(gap=1.0)
    assert config.limits.protect == (r"\d",)
    _, lossless, published, recommended = config.side_by_side()
    path = CONFIGS.parent / "benchmarks/results/embedded/tuning_problems.json"
    measured = json.loads(path.read_text())["decodings"]
    speeds = {name: one["tokens_per_second"] for name, one in measured.items()}
    assert published.to_rule() == Fly()
    for one in (recommended, lossless, config.replace(rule="exact")):
        ours = speeds[f"{one.rule}, K = {one.num_speculative_tokens}"]
        assert ours >= 0.9 * max(of for name, of in speeds.items() if name.startswith(one.rule))


@pytest.mark.parametrize(("values", "k", "rules"), [
    ({"rule": "exact", "window_size": 3}, 15, {"exact": Exact(), "fly": Fly(window_size=3)}),
    ({"rule": "sampled"}, 9, {"sampled": Exact(), "fly": Fly()}),
    (MARGIN, 4, {"exact": Exact(), "fly": Fly(window_size=3), "margin": Budget(Margin(), 2)}),
    (MARGIN, 3, {"exact": Exact(), "margin": Budget(Margin(), 2)}),
    ({"rule": "margin", "draft_confidence": 0.5}, 15, OF_MARGIN),
    ({"rule": "margin", "entropy": "full"}, 15, OF_MARGIN | {"fly": Fly(entropy="full")}),
    ({"boundary": "defer"}, 6, {"exact": Exact(), "fly": Fly()}),
    ({"rule": "exact"}, 4, {"exact": Exact()}),
    ({"rule": "sampled", "truncate": "margin"}, 15, {"sampled": Exact(Margin())}),
])  # fmt: skip
def test_side_by_side(values: Values, k: int, rules: dict[str, object]) -> None:
    """With published Fly beside another rule, where its window fits; a K of 15 is not said."""
    said = values if k == 15 else values | {"num_speculative_tokens": k}
    found = DecodingConfig(**said).side_by_side()
    sampling = Sampling() if values.get("rule") == "sampled" else None
    assert [(one.rule, one.to_rule(), one.num_speculative_tokens) for one in found] == [
        ("autoregressive", Exact(Margin() if "truncate" in values else None), 0),
        *((name, rule, k) for name, rule in rules.items()),
    ]
    for one in found:  # where nothing proposes, too
        assert one.to_sampling() == sampling
        assert one.truncate == one.without_draft().truncate == values.get("truncate")
        assert one.drafting.draft_confidence == values.get("draft_confidence", 0)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("fly_*")), ids=lambda path: path.stem)
def test_published(path: Path) -> None:
    config = load_config(path)
    window, match = ("reference", "earliest") if path.suffix == ".json" else ("paper", "latest")
    assert config.to_rule() == Fly(0.3, 6, "top_k", 3, window=window)
    assert config.num_speculative_tokens == (25 if "405b" in path.stem else 15)
    assert config.to_lookup() == Lookup(4, 1, 6, match)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"use_ngram": False}, {"prompt_lookup_max": 0}), ({"enable_fly": False}, {"rule": "exact"}),
    ({"abla_no_window": True}, {"window_size": 0, "rule": "fly"}),
    ({"enable_fly": False, "temperature": 1}, {"rule": "sampled", "temperature": 1}),
    ({"use_sd": False}, {"rule": "autoregressive"}),
    ({"spd_k": 25, "win_len": 8}, {"num_speculative_tokens": 25, "window_size": 8}),
    ({"dual_tok": False, "verbose": True, "target_model_path": "x"}, {"rule": "fly"}),
])  # fmt: skip
def test_reference_keys(changes: Values, expected: Values) -> None:
    found = from_reference_json(PUBLISHED | changes).to_dict()
    assert {name: found[name] for name in expected} == expected


def test_reference_defaults() -> None:
    """Those of the reference's constructor: n-grams of up to 3 tokens, 10 tokens, no gate."""
    config = from_reference_json({"spd_k": 15, "enable_fly": True, "win_len": 6, "use_ngram": True})
    assert config.to_lookup() == Lookup(3, 1, 10, "earliest")
    assert config.to_rule() == Fly(0.0, 6, window="reference")
    assert from_reference_json({"spd_k": 15}).to_lookup() is None


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.toml", 'rule = "fly"\nwindw_size = 4\n', ["windw_size", "window_size"]),
    ("a.toml", 'rule = "lucky"\n', ["lucky", "autoregressive", "fly"]), ("a.json", "{", ["JSON"]),
    ("a.toml", 'rule = "exact | fly"\n', ["exact | fly", "lossless"]),
    ("a.toml", 'protect = "a"\n', ["protect", "a list of texts"]), ("a.json", "[1]", ["object"]),
    ("a.toml", 'protect = ["["]\n', ["protect", "regular expression"]),
    ("a.toml", "memory = 3\n", ["memory", "text"]), ("a.toml", "self = 1\n", ["'self' is unknown"]),
    ("a.toml", "window_size = 4.5\n", ["window_size", "4.5", "whole"]),
    ("a.toml", "window_size = true\n", ["window_size", "True"]), ("a.yaml", "rule: fly", [".toml"]),
    ("a.toml", 'rule = "sampled"\ntruncate = "lucky"\n', ["truncate is 'lucky'", "margin"]),
    ("a.toml", 'truncate = "exact & margin"\n', ["truncate is 'exact & margin'", "lossless"]),
    ("a.toml", "[sampling]\ntemperature = 1\n", ["'sampling' is unknown", "temperature"]),
    ("a.toml", "rule = \n", ["TOML"]), ("a.json", '{"spd_k": 15, "enable_fly": true}', ["win_len"]),
    ("a.json", '{"spd_k": 15, "windows": 3}', ["windows", "win_len"]),
    ("a.json", '{"spd_k": "15"}', ["spd_k", "'15'"]), ("a.json", '{"enable_fly": true}', ["spd_k"]),
    ("a.json", '{"spd_k": 15, "dual_tok": true}', ["dual_tok"]),
    ("a.toml", 'rule = "\xff"', ["TOML"]),  # which is not UTF-8
    ("absent.toml", None, ["directory"]),
])  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, content: str | None, words: list[str]) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="latin-1")
    text = sentence(load_config, tmp_path / name)
    assert all(word in text for word in (str(tmp_path / name), *words)), text


def test_a_config_says_all_that_is_declared() -> None:
    """Whoever declares a parameter has said all there is to say of it."""
    names = [one.name for group in parameter_groups().values() for one in group]
    assert len(names) == len(set(names))
    config = DecodingConfig()
    for name, declared in decoding_parameters().items():
        assert name == "temperature" or config.to_dict()[name] == declared.default
        assert declared.help
        assert not declared.help.endswith(".")
    assert DecodingConfig(**config.to_dict()) == config
    assert hash(config) == hash(DecodingConfig(window_size=6))
    assert not hasattr(config, "windw_size")
    assert pickle.loads(pickle.dumps(DecodingConfig(window_size=3))).fly.window_size == 3
    assert_refused("'windw_size' is unknown", DecodingConfig, windw_size=3)
    assert_refused("window_size=6", DecodingConfig(num_speculative_tokens=6).to_rule)


def test_values_lie_over_one_another() -> None:
    config = DecodingConfig(rule="margin", margin_gap=1.0, lossless_speculative_tokens=9)
    assert config.replace(rule="exact").num_speculative_tokens == 9
    assert config.replace(rule="exact", num_speculative_tokens=4).num_speculative_tokens == 4
    assert config.replace(margin_gap=2).to_rule() == Margin(gap=2)
    assert config.replace(margin_gap=0.3) == config.replace(margin_gap=Margin.gap)
    assert_refused(r"margin_gap is \[1\]; it must be a number", config.replace, margin_gap=[1])


def test_parts_may_be_given_as_what_they_are() -> None:
    config = DecodingConfig(
        rule=Fly(window_size=2) & Margin(), lookup=Lookup(3, 2), sampling=Sampling(0.5, top_k=4)
    )
    assert config.replace(num_speculative_tokens=4).to_rule() == Fly(window_size=2) & Margin()
    assert config.to_lookup() == Lookup(3, 2)
    assert config.to_sampling() == Sampling(0.5, top_k=4)
    assert config.replace(rule="exact", temperature=0, top_k=0).to_rule() == Exact()
    assert DecodingConfig(rule=Exact()).rule == "exact"
    assert DecodingConfig(rule=Exact(), temperature=1).rule == "sampled"
    assert DecodingConfig(rule=Fly(), risk_budget=3).to_rule() == Budget(Fly(), 3)
    assert_refused("csd is greedy", DecodingConfig, rule=Fly() & Csd(), temperature=1)
    assert_refused("as truncate", DecodingConfig, rule=Exact(Margin()), temperature=1)


@fly_jax.data_tree
@dataclasses.dataclass(frozen=True)
class Lucky(fly_jax.Loose):
    """What a new rule's file holds."""

    luck: float = fly_jax.parameter(0.5, "lucky: how much of it", name="luck", low=0.0, high=1.0)

    def clauses(self) -> tuple[fly_jax.Clause, ...]:
        return Margin(gap=self.luck).clauses()


def test_rules_that_are_objects_and_numbers_of_numpy() -> None:
    config = DecodingConfig(rule=Fly(0.2, 2))
    assert_refused("window_size was given beside", config.replace, window_size=3)
    assert_refused("window_size was given beside", DecodingConfig, rule=Fly(), window_size=3)
    tuned = config.replace(rule="fly", window_size=3).replace(rule=Fly())
    assert (tuned.to_rule(), tuned.replace(rule="fly").to_rule()) == (Fly(), Fly(window_size=3))
    assert_refused("one number for each", config.replace, rule=Fly(np.float32([0.1, 0.2]), 2))
    assert_refused("which is not loosened", config.replace, rule=Rule())
    twice = {"temperature": 0.3, "sampling": Sampling(0.5)}
    assert_refused("temperature was given twice", config.replace, rule="sampled", **twice)
    drawn = DecodingConfig(rule="sampled", sampling=Sampling(0.7, top_k=5), lookup=Lookup(4))
    assert drawn.replace(rule="exact", sampling=None, lookup=None) == DecodingConfig(rule="exact")
    assert config.replace(num_speculative_tokens=np.int64(4)).num_speculative_tokens == 4
    assert_refused("no support of a distribution", Exact, Budget(Margin(), 1.0))


def test_a_new_rule_is_its_file_and_its_registration(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setitem(RULES, "lucky", Lucky)
    path = tmp_path / "lucky.toml"
    path.write_text('rule = "lucky & fly"\nluck = 0.25\n')
    assert load_config(path).to_rule() == Lucky(0.25) & Fly()
    path.write_text("luck = 2\n")
    words = "luck is 2; it must be a number of at least 0 and of at most 1"
    assert_refused(words, load_config, path)
    flags = Flags("generate", DecodingFlags)
    values = flags.parse(["--rule=lucky", "--luck=0.75"], "")
    assert values is not None
    assert values.to_config().to_rule() == Lucky(0.75)
    assert "lucky: how much of it; 0.5 if not given" in flags.help()
    assert "margin, lucky, several joined" in " ".join(flags.help().split())
