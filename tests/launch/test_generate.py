"""The command as its users see it, on a tiny random pair; each thing is opened and read once.

Every loosened rule, its limits, its memory and its gate; converted checkpoints and GGUF files.
"""

import builtins
import collections
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from gguf_files import CONFIG, byte_level_writer, tensors_of, write_sized
from launch_types import Decoded, Folders, Interrupted, Patch, Ran, Refused
from tokenizer_makers import llama3_json

from fly_jax import CorrectionMemory, Exact, load_config, load_memory, load_pair
from fly_jax.decoding import pair
from fly_jax.engine import generation
from fly_jax.evaluation import calibration
from fly_jax.evaluation.problems import Problem
from fly_jax.launch import generate, inputs
from fly_jax.launch.__main__ import main
from fly_jax.launch.inputs import Prompt
from fly_jax.models import tokenizer
from fly_jax.models.checkpoints import converted, hugging_face, load
from fly_jax.models.llama import Llama
from fly_jax.models.tokenizer import Tokenizer

KEYS = {
    "prompt", "prompt_token_ids", "token_ids", "text", "finish_reason", "rule", "num_rounds",
    "mean_accepted_tokens", "num_draft_tokens", "num_accepted_tokens", "num_rescued_tokens",
    "num_rollbacks", "tokens_per_second", "why",
}  # fmt: skip
PROMPTS = ["Ada has 3 apples", "Boris"]
SIZES = ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]
BORIS = ["--prompt=Boris", *SIZES]
TWO = [f"--prompt={PROMPTS[0]}", *BORIS]
BOTH = ["--rule=fly", *TWO]


def test_json_and_text(
    models: list[str], tiny_pair: Folders, tokenizer: Tokenizer, of_pair: Decoded, ran: Ran
) -> None:
    """And the same text with the target as a draft below the draft."""
    found = of_pair(*BOTH)
    out, said = ran(*models, *BOTH)
    assert out == "".join(f"{one['prompt']}{one['text']}\n\n" for one in found)
    assert "[2/2]" in said
    assert "\x1b" not in out + said
    stack = of_pair(f"--draft={tiny_pair[0]}", "--level_speculative_tokens=2", *BOTH)
    for key in ("token_ids", "why", "num_rounds"):
        assert [one[key] for one in stack] == [one[key] for one in found]
    assert [record["prompt"] for record in found] == PROMPTS
    for record in found:
        ids = record["token_ids"]
        assert (record.keys(), record["rule"]) == (KEYS, "fly")
        assert record["prompt_token_ids"] == tokenizer.encode(record["prompt"])
        assert record["text"] == tokenizer.decode(ids)
        ends = ids[-1] in tokenizer.eos_token_ids
        assert record["finish_reason"] == ("stop" if ends else "length")
        assert len(ids) == 20 or ends
        assert len(record["why"]) == len(ids)
        assert set(record["why"]) <= set("mrcb")
        assert record["num_rescued_tokens"] >= record["why"].count("r")
        assert record["num_draft_tokens"] == 4 * record["num_rounds"]
        assert record["mean_accepted_tokens"] == pytest.approx(len(ids) / record["num_rounds"])
        assert record["tokens_per_second"] > 0
    assert "m" in "".join(record["why"] for record in found)


def test_sampling_is_the_seeds(of_pair: Decoded) -> None:
    found = [of_pair(*BORIS, "--rule=sampled", f"--seed={seed}") for seed in (1, 1, 2)]
    first, again, other = (one[0]["token_ids"] for one in found)
    assert first == again != other


def test_comparison_leaves_stdout_to_json(models: list[str], ran: Ran) -> None:
    """And has the rule that was asked for."""
    out, said = ran(*models, *BORIS, "--rule=lossy", "--compare", "--json")
    assert len(out.splitlines()) == 1
    assert json.loads(out)["prompt"] == "Boris"
    names = [line.split()[0] for line in said.splitlines()[-4:]]
    assert names == ["autoregressive", "exact", "fly", "lossy"]


def test_without_flags(tiny_pair: Folders, monkeypatch: Patch, ran: Ran) -> None:
    """The built-in pair continues built-in prompts, and the table says how many were right."""
    monkeypatch.setattr("fly_jax.decoding.pair.EMBEDDED_PAIR", tiny_pair)
    problem = Problem("Boris", " buys 3.\nAnswer: 3", "3")
    prompts = [Prompt(problem.prompt, "A built-in prompt", problem), Prompt("Ada", "Another")]
    monkeypatch.setattr(inputs, "built_in_prompts", lambda: prompts)
    lines = ran(*SIZES).out.splitlines()
    assert lines[0].startswith("Boris")
    table = [line.split() for line in lines[-6:]]
    assert [row[0] for row in table[2:]] == ["autoregressive", "exact", "fly", "margin"]
    assert all("0/1" in row for row in table[2:])


def test_bad_lines_are_skipped(models: list[str], tmp_path: Path, ran: Ran) -> None:
    long = json.dumps({"prompt": "Ada " * 200}).encode()
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"prompt": "Boris"}\n{"prompt": \n\xff\n' + long + b'\n{"prompt": "Ada"}\n')
    out, said = ran(*models, f"--prompts_file={file}", *SIZES, "--json", "--skip_bad_prompts")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Boris", "Ada"]
    assert all(f"line {number}" in said for number in (2, 3, 4))
    file.write_text("nonsense\n")
    ran(*models, f"--prompts_file={file}", "--skip_bad_prompts", status=2)  # nothing is left


def test_a_mesh_changes_no_token(models: list[str], of_pair: Decoded) -> None:
    """In a process of its own, where the devices have to be simulated."""
    command = [sys.executable, "-m", "fly_jax.launch", *models, *BOTH, "--json", "--mesh=8x8"]
    there = {**os.environ, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, capture_output=True, text=True, input="", env=there)
    assert finished.returncode == 0, finished.stderr
    assert "64 simulated devices (CPU) as mesh 8x8" in finished.stderr.splitlines()[0]
    sharded = [json.loads(line)["token_ids"] for line in finished.stdout.splitlines()]
    assert sharded == [one["token_ids"] for one in of_pair(*BOTH)]


LOOKED_UP = ["--prompt=Ada has 3 apples and Ada has 3", "--max_new_tokens=12"]
EXACT = ["--rule=exact", "--num_speculative_tokens=4"]


def test_lookup_or_nothing_drafts(
    tiny_pair: Folders, decoded: Decoded, ran: Ran, monkeypatch: Patch
) -> None:
    target = [*LOOKED_UP, f"--target={tiny_pair[0]}", "--dtype=float32", "--json"]
    said = [ran(*target), ran(*target, "--draft=ngram", *EXACT)]
    assert [one.err.count("one token at a time") for one in said] == [1, 0]
    alone, named = (json.loads(one.out) for one in said)
    assert alone["rule"] == "autoregressive"
    (implied,) = decoded(*target, "--prompt_lookup_max=4", "--num_speculative_tokens=4")
    assert implied["rule"] == "exact"  # where nobody says: copies are not loosened
    assert named["token_ids"] == implied["token_ids"] == alone["token_ids"]
    assert named["num_draft_tokens"] == implied["num_draft_tokens"] > 0
    # And with the target of the pair that ships.
    monkeypatch.setattr(pair, "EMBEDDED_PAIR", tiny_pair)
    (found,) = decoded(*LOOKED_UP, "--draft=ngram", *EXACT)
    assert found["token_ids"] == alone["token_ids"]
    assert found["num_draft_tokens"] > 0


Counts = collections.Counter[str]


@pytest.fixture
def counted(monkeypatch: Patch) -> Counts:
    """How often what is opened, read, parsed or encoded is: by its name and first argument."""
    counts = Counts()

    def count(owner: Any, name: str, at: int = 0) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[f"{name} {args[at]}"] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("HuggingFaceSource", "load_tokenizer"):
        count(load, name)
    count(tokenizer, "_sentence_piece_vocabulary")
    count(tokenizer.Tokenizer, "encode", 1)
    count(hugging_face, "read_config")
    for owner in (inputs.meshes, pair):
        count(owner, "parse_mesh")
        count(owner, "create_mesh")
    return counts


@pytest.mark.parametrize("command", ["generate", "calibrate"])
def test_everything_is_opened_once(
    counted: Counts, models: list[str], tiny_pair: Folders, tmp_path: Path, command: str
) -> None:
    """Each prompt is encoded once too, whatever is compared."""
    (prompts := tmp_path / "prompts.txt").write_text("Ada has 3 apples\nBoris\n")
    memory = [f"--memory={tmp_path / 'memory.npz'}", *SIZES[:2]]
    own = ["--compare", *SIZES, "--json"] if command == "generate" else memory
    assert main([command, *models, "--mesh=1x1", f"--prompts_file={prompts}", *own]) == 0
    expected = ["parse_mesh 1x1", "create_mesh 1x1", *(f"encode {one}" for one in PROMPTS)]
    for folder in tiny_pair:
        opening = ("HuggingFaceSource", "read_config", "load_tokenizer")
        expected += [f"{name} {folder}" for name in opening]
        expected += [f"_sentence_piece_vocabulary {folder / 'tokenizer.model'}"]
    assert dict(counted) == dict.fromkeys(expected, 1)


def test_the_library_and_the_command_decode_alike(
    tiny_pair: Folders, decoded: Decoded, monkeypatch: Patch
) -> None:
    """With the pair that ships and nothing else said, and with a rule alone."""
    monkeypatch.setattr(pair, "EMBEDDED_PAIR", tiny_pair)
    shipped = load_pair()
    for flags, given in (([], {}), (["--rule=exact"], {"rule": Exact()})):
        (record,) = decoded(f"--prompt={PROMPTS[0]}", "--max_new_tokens=24", *flags)
        (one,) = generation.generate(shipped, PROMPTS[:1], max_new_tokens=24, **given)
        assert record["token_ids"] == one.token_ids
        assert record["why"] == "".join(why.letter for why in one.why)
        assert record["num_draft_tokens"] == one.num_draft_tokens


LEARN = [f"{name} {number} apples" for name in ("Ada has", "Boris buys") for number in range(6)]
SHORT = ["--max_new_tokens=20", "--batch_size=3"]
Calibrate = Callable[..., list[str]]


@pytest.fixture(scope="module")
def calibrate(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Calibrate:
    """The command line that writes to a memory or a gate, which is added to it."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("\n".join(LEARN))
    given = [f"--prompts_file={prompts}", *SHORT, "--num_speculative_tokens=6"]
    target, draft, dtype = models

    def arguments(*more: str, drafts: Sequence[str] = (draft,)) -> list[str]:
        return ["calibrate", target, *drafts, dtype, *given, *more]

    return arguments


@pytest.fixture(scope="module")
def memory(calibrate: Calibrate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory of the tiny pair, filled by the command."""
    path = tmp_path_factory.mktemp("memory") / "corrections.npz"
    assert main(calibrate(f"--memory={path}")) == 0
    return path


def test_rules_by_name(memory: Path, of_pair: Decoded) -> None:
    """One with a memory, and one with evidence of its own; what each means is tested elsewhere."""
    exact = [one["token_ids"] for one in of_pair(*TWO, "--rule=exact")]
    loosest = [f"--memory={memory}", "--csd_min_count=0", "--csd_consistency=0"]
    for rule, loose in (("csd", loosest), ("fly & margin | typical", [])):
        found = of_pair(*TWO, f"--rule={rule}", *loose)
        assert [one["rule"] for one in found] == [rule] * 2
        assert sum(one["num_rescued_tokens"] for one in found) > 0, rule
        assert all(one["num_rescued_tokens"] == one["why"].count("r") for one in found)
        assert "regret" not in found[0]
    lossless = of_pair(*TWO, f"--rule={rule}", *loose, "--risk_budget=0")
    assert [one["token_ids"] for one in lossless] == exact
    assert [one["regret"] for one in lossless] == [0, 0]


def test_tokens_are_protected(tokenizer: Tokenizer, of_pair: Decoded) -> None:
    laxest = [*TWO, "--rule=margin", "--margin_gap=100"]
    for flags in ([], ["--protect=[a-z]", r"--protect=[\x00-\x1f]"]):
        texts = [
            tokenizer.vocabulary.token_bytes(token, False)
            for one in of_pair(*laxest, *flags)
            for token, why in zip(one["token_ids"], one["why"], strict=True)
            if why == "r"
        ]
        assert any(re.search(b"[a-z]", text) for text in texts) == (not flags)


def test_a_config_gives_way_to_flags(memory: Path, tmp_path: Path, of_pair: Decoded) -> None:
    """And so does its memory, which the flag's rule does not use."""
    config = tmp_path / "loose.toml"
    given = [*SIZES, "--prompt=Boris", f"--config={config}"]
    config.write_text(
        f'rule = "fly | csd"\nmemory = "{memory}"\ncsd_min_count = 0\ncsd_online = false\n'
        'risk_budget = 5.0\nprotect = ["\\\\d"]\n'
    )
    (one,) = of_pair(*given)
    assert one["rule"] == "fly | csd"
    assert 0 <= one["regret"] <= 5
    config.write_text('rule = "csd"\nmemory = "nowhere.npz"\n')
    (one,) = of_pair(*given, "--rule=exact")
    assert one["rule"] == "exact"


def test_what_is_learned_is_kept_if_asked_for(
    models: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    """In a file that is there or not, and when the decoding is interrupted; else nothing is."""
    path = tmp_path / "new" / "learned.npz"
    arguments = [*models, *TWO, "--rule=csd", f"--memory={path}", "--csd_min_count=0"]

    def counts(*more: str, status: int = 0) -> dict[tuple[int, int], int]:
        ran(*arguments, *more, status=status)
        return load_memory(path, tokenizer.digest)._counts

    learned = counts("--update_memory")
    assert len(learned) > 5
    assert counts() == learned
    again = counts("--update_memory")
    assert sum(again.values()) > sum(learned.values())
    monkeypatch.setattr(generate, "_record", Mock(side_effect=KeyboardInterrupt))
    more = counts("--json", "--update_memory", status=130)
    assert sum(more.values()) > sum(again.values())
    wrong = ran(*arguments, f"--memory={tmp_path}", "--update_memory", status=2)
    assert "cannot be read" in wrong.err


def test_calibrating_goes_on_where_it_was(
    calibrate: Calibrate, memory: Path, tokenizer: Tokenizer, tmp_path: Path, ran: Ran
) -> None:
    whole = load_memory(memory, tokenizer.digest)
    assert len(whole) > 10
    path = tmp_path / "corrections.npz"
    arguments = calibrate(f"--memory={path}")
    with Patch.context() as patch:
        patch.setattr(calibration, "tqdm", Interrupted)
        patch.setattr(calibration, "_BATCHES", 1)
        assert "Go on where it was with" in ran(*arguments, status=130).err
    assert 0 < len(load_memory(path, tokenizer.digest)) < len(whole)
    for said in (f"counts {len(whole)} pairs", ""):  # the second time nothing is left to count
        assert said in ran(*arguments).err
        found = load_memory(path, tokenizer.digest)
        assert (found.keys() == whole.keys()).all()
        assert found._counts == whole._counts


def test_what_is_refused(
    refused: Refused, calibrate: Calibrate, models: list[str], memory: Path, tmp_path: Path
) -> None:
    """By calibrate, and memories by generate."""
    path, filled = tmp_path / "a.npz", f"--memory={memory}"
    new, itself = f"--memory={path}", models[0].replace("--target", "--draft")
    refused(*calibrate(), words=["--memory"])
    refused(*calibrate(new, drafts=()), words=["--draft"])
    for more in ("--max_new_tokens=19", "--dtype=int8"):
        refused(*calibrate(filled, more), words=["another run"])
    refused(*calibrate(filled, drafts=[itself]), words=["another run"])
    (long := tmp_path / "long.txt").write_text("Ada " * 200)
    refused(*calibrate(new, f"--prompts_file={long}"), words=["context"])
    refused(*calibrate(new, "--num_speculative_tokens=5000"), words=["5000"])
    refused(*calibrate(f"{filled}/c.npz"), words=["written"])
    arguments = [*models, "--prompt=x", "--rule=fly | csd", new]
    path.write_bytes(memory.read_bytes()[:-50])
    refused(*arguments, words=["damaged"])
    CorrectionMemory("another").save(path)
    refused(*arguments, words=["another vocabulary"])


def test_what_is_written_meets_the_bound(
    calibrate: Calibrate, tmp_path: Path, of_pair: Decoded, ran: Ran
) -> None:
    limit, path = 0.2, tmp_path / "found.toml"
    arguments = calibrate(f"--gate={path}", "--rule=margin", f"--max_disagreement={limit}")
    said, text = ran(*arguments).err, path.read_text()
    command = shlex.split(text.splitlines()[0].removeprefix("# "))
    assert command == ["python", "-m", "fly_jax.launch", *arguments]
    config = load_config(path)
    assert (config.rule, config.num_speculative_tokens) == ("margin", 6)
    assert f"margin_gap = {config.to_dict()['margin_gap']}" in text
    # On the prompts that the setting was checked with.
    given = [f"--prompt={prompt}" for prompt in LEARN[1::2]]
    found = of_pair(f"--config={path}", *given, *SHORT)
    tokens = sum(len(one["token_ids"]) for one in found)
    rescues = sum(one["num_rescued_tokens"] for one in found)
    assert 0 < rescues / tokens <= limit
    figure = f"{100 * rescues / tokens:.2f} rescues in 100 tokens"
    assert f"({tokens} tokens): {figure}" in text
    mean = tokens / sum(one["num_rounds"] for one in found)
    assert f"{mean:.2f} mean accepted tokens" in text
    assert figure in said


def test_windows_are_tried_and_other_values_kept(calibrate: Calibrate, tmp_path: Path) -> None:
    base, path = tmp_path / "base.toml", tmp_path / "found.toml"
    base.write_text('rule = "fly | margin"\nentropy_top_k = 2\nprotect = ["\\\\d"]\n')
    assert main(calibrate(f"--gate={path}", f"--config={base}", "--max_regret=0.2")) == 0
    found = load_config(path)
    assert (found.rule, found.limits.protect) == ("fly | margin", ("\\d",))
    assert (found.fly.entropy_top_k, found.fly.window_size) == (2, 4), "no others fit K = 6"
    regret = re.findall(r"tokens\): ([0-9.]+) nats a token", path.read_text())
    assert 0 < float(regret[0]) <= 0.2


def test_what_a_gate_refuses(refused: Refused, calibrate: Calibrate, tmp_path: Path) -> None:
    """A gate where a memory is filled, configs that have none, and too few prompts."""
    base, few = tmp_path / "base.toml", tmp_path / "few.txt"
    begun = calibrate(f"--gate={tmp_path / 'found.toml'}", "--max_regret=0.1")
    for line in ('boundary = "defer"', "risk_budget = 3.0", "temperature = 0.5"):
        base.write_text(f'rule = "fly"\nnum_speculative_tokens = 15\n{line}')
        refused(*begun, f"--config={base}", words=[line.split()[0]])
    for flag in ("--max_regret=0.1", "--rule=fly"):
        refused(*calibrate("--memory=x.npz", flag), words=[flag.split("=")[0]])
    few.write_text("Ada\nBoris\n")
    refused(*begun, f"--prompts_file={few}", words=["2 prompts", "8"])


def test_a_search_that_finds_nothing_writes_nothing(
    calibrate: Calibrate, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    """Since nothing meets the bound, or since it is interrupted."""
    path = tmp_path / "found.toml"
    begun = calibrate(f"--gate={path}", "--rule=margin")
    said = ran(*begun, "--max_disagreement=0.0001", status=2).err
    assert "0.01 rescues in 100 tokens" in said.splitlines()[-1]
    assert not path.exists()
    monkeypatch.setattr(calibration, "tqdm", Interrupted)
    said = ran(*begun, "--max_regret=0.1", status=130).err
    assert "Nothing was written; begin again with: python -m" in said
    assert not path.exists()


Tokens = Callable[..., list[int]]


@pytest.fixture
def tokens(decoded: Decoded) -> Tokens:
    given = "--max_new_tokens=12"
    return lambda prompt, *flags: decoded(*flags, f"--prompt={prompt}", given)[0]["token_ids"]


def test_an_interrupted_conversion_says_how_to_go_on(
    tiny_pair: Folders, tmp_path: Path, monkeypatch: Patch, ran: Ran
) -> None:
    arguments = ["convert", f"--target={tiny_pair[0]}", f"--output={tmp_path / 'output'}"]
    with monkeypatch.context() as patch:
        patch.setattr(converted, "write_group", Mock(side_effect=KeyboardInterrupt))
        said = ran(*arguments, status=130).err
    assert "python -m fly_jax.launch " + " ".join(arguments) in said
    ran(*arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two models that share a tokenizer with a chat template."""
    made = llama3_json()
    put = byte_level_writer(made, "gpt-2", adds_bos=True)

    def write(number: int) -> Path:
        tensors = tensors_of(Llama.random(CONFIG, jax.random.key(number)))
        path = tmp_path_factory.mktemp("gguf") / "model.gguf"
        return write_sized(path, tensors, made.get_vocab_size(), put)

    return write(0), write(1)


def test_target_and_drafts(files: Folders, tokens: Tokens, tmp_path: Path, ran: Ran) -> None:
    target, output = f"--target={files[0]}", tmp_path / "folder"
    alone = tokens("the fox", target)
    assert len(alone) > 4
    sizes = ["--mesh=1x1", "--context=64", "--nocompile", "--json"]
    for draft in (str(files[1]), "self:int4"):
        assert tokens("the fox", target, f"--draft={draft}", *EXACT) == alone
        plan = json.loads(ran("plan", target, f"--draft={draft}", *sizes).out)
        kinds = {one["matrices"] for one in plan["drafters"]["passes"]}
        assert ("int4" in kinds) == (draft == "self:int4")
    assert main(["convert", target, f"--output={output}", "--dtype=float32"]) == 0
    assert tokens("the fox", f"--target={output}") == alone


def test_a_chat(files: Folders, tokens: Tokens, ran: Ran, monkeypatch: Patch) -> None:
    """The README's command, which a file alone is enough for."""
    given = [f"--target={files[0]}", "--dtype=int8"]
    expected = tokens("the fox", *given)
    monkeypatch.setattr(builtins, "input", Mock(side_effect=["the fox", EOFError]))
    said = ran("chat", *given, "--draft=self:int4", *EXACT, "--max_new_tokens=12").err
    assert all(words in said for words in (f"[{len(expected)} tokens, ", "mean accepted tokens"))
    assert said.count("On a CPU a pass of self:int4 takes as long as an int8 target's") == 1


def test_a_file_that_was_cut_off(refused: Refused, files: Folders, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files[0].read_bytes()[:-5000])
    for command, own in (
        ("generate", ["--prompt=the fox"]), ("plan", [f"--draft={files[1]}", "--nocompile"]),
        ("chat", []), ("convert", [f"--output={tmp_path / 'folder'}"]),
    ):  # fmt: skip
        refused(command, f"--target={cut}", *own, words=[str(cut), "cut off"])
