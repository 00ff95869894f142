"""The pages of docs/: their blocks run as printed, and they name what there is."""

import ast
import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fly_jax
from fly_jax.evaluation.audit_file import Mismatch
from fly_jax.evaluation.audit_summary import CLASSES
from fly_jax.integrations.vllm_tpu.startup import asked_for, decoding_config, known
from fly_jax.launch import generate, inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import built_in_prompts
from fly_jax.verification.rules import Rule

ROOT = Path(__file__).parents[2]
Names = dict[str, Any]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}


def blocks(page: str, language: str = "python") -> list[str]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


def executed(page: str, number: int) -> Names:
    """The namespace in which all blocks of a page have run."""
    names: Names = {}
    assert len(blocks(page)) == PAGES[page].count("```") / 2 == number, "a block is new: test it"
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    return names


@pytest.fixture(scope="module")
def library() -> Names:
    return executed("library", 10)


def test_the_rules_differ_as_the_page_says(library: Names) -> None:
    plain, exact, fast = library["plain"], library["exact"], library["fast"]
    assert exact.token_ids == plain.token_ids
    assert fast.num_rounds <= exact.num_rounds < plain.num_rounds == len(plain.token_ids)
    assert min(len(one.token_ids) for one in (plain, library["drawn"])) > 10


def test_streamed_text_is_that_of_generate(library: Names) -> None:
    pair, options = library["pair"], {"max_new_tokens": 64, "batch_size": 2}
    whole = fly_jax.generate(pair, library["prompts"], rule=fly_jax.Fly(), **options)
    written = {one.generation.prompt_token_ids: text for one, text in library["written"].items()}
    assert written == {
        one.prompt_token_ids: pair.tokenizer.decode(one.token_ids, continues=True) for one in whole
    }
    assert all(written.values())


def generated(library: Names, rule: Rule, k: int, number: int) -> fly_jax.Generation:
    """So many tokens after the first of the page's prompts, with K draft tokens."""
    options = {"num_speculative_tokens": k, "max_new_tokens": number, "protect": ()}
    return fly_jax.generate(library["pair"], library["ids"][:1], rule=rule, **options)[0]


def test_loops_and_steps_give_the_tokens_of_generate(library: Names) -> None:
    exact = generated(library, fly_jax.Exact(), 0, 48)
    loosened = generated(library, fly_jax.Fly(), library["K"], 48)
    assert (library["loop_exact"], library["loop_fly"]) == (exact.token_ids, loosened.token_ids)
    assert min(map(len, (exact.token_ids, loosened.token_ids, library["loop_doubt"]))) > 10
    assert exact.num_rescued_tokens == 0
    assert loosened.num_rescued_tokens > 0
    assert library["loop_doubt"] != library["loop_exact"], "a rule of one's own rescues"
    assert library["mixed"].num_accepted.shape == (3,), "each row has its own rule"
    expected = generated(library, fly_jax.Fly(), library["K"], len(library["stepwise"]))
    settled = len(expected.token_ids)  # the steps of the page go on after an end of text
    assert settled >= 4, "each of the four rounds settles a token at least"
    assert library["stepwise"][:settled] == expected.token_ids


def test_the_foreign_loop_fits_on_the_page_and_is_public() -> None:
    code = "".join(blocks("library"))
    assert not re.search(r"(from|import) fly_jax\.", code)
    assert set() < set(re.findall(r"fly_jax\.(\w+)", code)) <= set(fly_jax.__all__)
    (loop,) = [block for block in blocks("library") if "def decode(" in block]
    body = loop.split("def decode(")[1]
    assert len(body.splitlines()) <= 12
    (rule,) = [block for block in blocks("library") if "class Doubt" in block]
    assert len([line for line in rule.splitlines() if line]) <= 21, "twenty, and the loop"
    assert "pair" not in body, "a foreign engine has no pair"


def test_sharded_logits_give_the_same_evidence(library: Names) -> None:
    shards = library["sharded"].sharding.shard_shape(library["sharded"].shape)
    assert shards[2] * jax.device_count() == library["vocab_size"] > shards[2]
    for name in ("argmax", "accepted", "replacement"):
        here, there = getattr(library["on_one"], name), getattr(library["on_mesh"], name)
        np.testing.assert_array_equal(here, there)
    np.testing.assert_allclose(library["on_one"].entropy, library["on_mesh"].entropy, rtol=1e-5)
    for words in ("num_speculative_tokens=6", "window_size=6"):  # of a call that cannot work
        assert words in library["refusal"]


def test_the_engine_gives_the_same_answers_with_asyncio() -> None:
    """And each rule its own, on the page of the engine."""
    engine = executed("engine", 3)
    found = {name: one.generation for name, one in engine["states"].items()}
    assert all(len(one.token_ids) > 4 for one in found.values())
    assert found["lossless"].num_rescued_tokens == 0
    assert found["drawn"].token_ids != found["lossless"].token_ids
    reused, length = engine["states"]["lossless"].num_reused, len(engine["prompt"])
    assert reused == length - 1 or length < 16
    alone = [one.generation for one in engine["engine"].answer(engine["requests"])]
    assert engine["answers"] == [engine["pair"].tokenizer.decode(one.token_ids) for one in alone]
    assert engine["engine"].is_idle


def audit_block(language: str) -> str:
    assert PAGES["audit"].count("```") == 2 * 3, "a block is new: test it"
    (text,) = blocks("audit", language)
    return text


def test_the_commands_of_an_audit_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two of the built-in prompts, enough for --prompt 2, and without the comparison."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "built_in_prompts", lambda: built_in_prompts()[:2])
    monkeypatch.setattr(generate, "_compare", lambda *_: None)
    printed = []
    for line in audit_block("bash").splitlines():
        python, module, name, *arguments = shlex.split(line)
        assert (python, module, name) == ("python", "-m", "fly_jax.launch")
        assert main(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[2]
    # What is shown on the page has the form of what is printed now.
    shown, now = (
        [re.sub(r"[\d.]+|\s+", "", line) for line in text.splitlines()]
        for text in (audit_block("text"), printed[1])
    )
    assert shown[:3] == now[:3]
    headings = ("classrescued", "draftkept")
    of_page, of_now = ({one for one in some if one.startswith(headings)} for some in (shown, now))
    assert of_page == of_now
    assert "Prompt 2" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_block_of_an_audit_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(audit_block("python"), "audit.md", "exec"), {})
    assert "nats" in capsys.readouterr().out
    assert set(re.findall(r"fly_jax\.(\w+)", audit_block("python"))) <= set(fly_jax.__all__)


def test_the_keys_and_classes_are_those_of_the_file() -> None:
    cells = re.findall(r"^\| (`.*?`) \|", PAGES["audit"], re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in dataclasses.fields(Mismatch)}
    listed = audit_block("text").split("class ")[1].split("\n\n")[0].splitlines()[1:]
    for line in listed:
        assert any(line.startswith(name) and line.endswith(CLASSES[name]) for name in CLASSES)


def test_a_loop_of_ones_own_runs_and_files_are_there() -> None:
    (block,) = [text for text in blocks("integrations") if "fly_jax.verify" in text]
    names: Names = {}
    exec(block, names)
    assert names["emitted"]
    for name in re.findall(r"\]\(((?:\.\./)?[\w/]+\.\w+)", PAGES["integrations"]):
        assert (ROOT / "docs" / name).exists(), name


def test_settings_are_those_that_there_are() -> None:
    page = PAGES["integrations"]
    table = page[page.index("| setting |") : page.index("It works with the engine's own")]
    cells = [row.split("|")[1] for row in table.strip().splitlines()[2:]]
    named = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert {"rule", "protect", "any_version", "risk_budget"} <= named <= known().keys()


def test_what_the_commands_ask_for_can_be_had() -> None:
    (server,) = blocks("integrations", "bash")
    given = {name: json.loads(text) for name, text in re.findall(r"--(\S+)-config '(.*)'", server)}
    asked = asked_for(given["additional"]["fly_jax"], {}) or {}
    assert decoding_config(asked, given["speculative"]["num_speculative_tokens"]).rule == "fly"
    (offline,) = [text for text in blocks("integrations") if "vllm" in text]
    ast.parse(offline)
