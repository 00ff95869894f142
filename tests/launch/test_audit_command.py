"""generate --audit and the command audit, and its page as a browser would parse it."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from launch_types import Decoded, Ran, Refused

from fly_jax.evaluation.audit_file import Audit, Continuation, Mismatch, Run
from fly_jax.launch.__main__ import main
from fly_jax.launch.view import page
from fly_jax.models.tokenizer import Tokenizer

GIVEN = ["--prompt=Ada has 3 apples", "--prompt=<script>Boris", "--prompt=Vera's"]
GIVEN += ["--max_new_tokens=20", "--num_speculative_tokens=4", "--window_size=2"]
# It rescues whatever it can pay for.
RULE = ["--rule=margin", "--margin_gap=100", "--risk_budget=6"]


@pytest.fixture(scope="module")
def audit(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    assert main([*models, *GIVEN, *RULE, f"--audit={path}"]) == 0
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_was_generated(audit: Path, tokenizer: Tokenizer, of_pair: Decoded) -> None:
    fast, exact = of_pair(*GIVEN, *RULE), of_pair(*GIVEN, "--rule=exact")
    first, *events = lines(audit)
    run = {"event": "run", "rule": "margin", "version": 1, "entropy_measure": "top_3"}
    assert (first, first["settings"]["risk_budget"]) == (first | run, 6)
    for index, (one, other) in enumerate(zip(fast, exact, strict=True)):
        *mismatches, whole = [event for event in events if event["prompt"] == index]
        same = ("token_ids", "why", "text", "finish_reason", "num_rounds")
        expected = {name: one[name] for name in same} | {"event": "prompt"}
        expected |= {"prompt_text": one["prompt"], "exact_text": other["text"]}
        assert whole == whole | expected
        assert "".join(whole["token_texts"]).removesuffix("</s>") == one["text"]
        kept = [event for event in mismatches if event["event"] == "rescue"]
        assert [event["position"] for event in kept] == [
            at for at, why in enumerate(one["why"]) if why == "r"
        ]
        assert len(mismatches) - len(kept) == one["why"].count("c")
        left = 6.0
        for event in mismatches:
            ratio = event["choice_probability"] / event["draft_probability"]
            assert event["regret"] == pytest.approx(math.log(ratio), abs=1e-4)
            left -= event["regret"] if event["event"] == "rescue" else 0
            assert event["budget_left"] == pytest.approx(max(left, 0), abs=1e-4)
            assert event["draft_text"] == tokenizer.token_text(event["draft_id"])
            stands = event["draft_id" if event["event"] == "rescue" else "choice_id"]
            assert (one["token_ids"][event["position"]], event["window"]) == (stands, None)
            text = one["prompt"] + "".join(whole["token_texts"][: event["position"]])
            assert text.endswith(event["context"])
            assert event["refused_by"] == (None if event["event"] == "rescue" else "budget")
        assert one["regret"] == pytest.approx(6 - left, abs=1e-3)
    assert "refusal" in {event["event"] for event in events}


def test_deferred_windows(tmp_path: Path, of_pair: Decoded, ran: Ran) -> None:
    path = tmp_path / "audit.jsonl"
    flags = ["--rule=fly", "--boundary=defer", "--entropy_threshold=0.01", "--noaudit_exact"]
    found = of_pair(*GIVEN, *flags, f"--audit={path}")
    events = [event for event in lines(path) if event["event"] == "rescue"]
    assert len(events) == sum(one["num_rescued_tokens"] for one in found)
    assert {"held"} <= {event["window"] for event in events} <= {"held", "completed"}
    assert {event["entropy_measure"] for event in events} == {"top_3"}
    summary = json.loads(ran("audit", str(path), "--json").out)
    assert (summary["compared"], sum(summary["windows"].values())) == (0, len(events))


def test_a_summary_and_a_page(audit: Path, tmp_path: Path, ran: Ran) -> None:
    html = tmp_path / "page.html"
    shown = ran("audit", f"--html={html}", str(audit), "--prompt=2", "--pairs", "3").out
    rescues = sum(line["event"] == "rescue" for line in lines(audit))
    whole = f"rule margin: 3 prompts, 60 tokens, {rescues} rescues"
    assert all(words in shown for words in (whole, "of 3 texts", "by budget"))
    summary = json.loads(ran("audit", str(audit), "--json").out)
    assert summary["rescues"] == rescues == sum(pair["count"] for pair in summary["pairs"])
    assert summary["windows"] == {"none": rescues}
    text = html.read_text(encoding="utf-8")
    assert ("&lt;script&gt;Boris" in text, "<script" in text) == (True, False)
    path = tmp_path / "cut.jsonl"  # of a run that was stopped
    path.write_bytes(audit.read_bytes()[:-30])
    said, warning = ran("audit", str(path))
    assert ("2 prompts" in said, "breaks off" in warning, warning.count("\n")) == (True, True, 1)


def test_bad_input(audit: Path, refused: Refused) -> None:
    file = str(audit)
    refused("audit", words=["needs a file"])
    refused("audit", "/nowhere/audit.jsonl", words=["/nowhere/audit.jsonl", "cannot be read"])
    refused("audit", file, file, words=["one file", "2"])
    refused("audit", file, "--html=page.html", "--prompt=9", words=["prompt 9", "1, 2, 3"])
    refused("audit", file, f"--html={file}", words=["written over"])
    refused("audit", file, "--html=/nowhere/page.html", words=["/nowhere/page.html"])
    refused("audit", file, "--htm=x", words=["--htm"])
    refused("audit", file, "--pairs=-1", words=["pairs"])


EVIL = '<script>alert("1")</script> & \x1b[31m'
ONE = Continuation(
    prompt=0, prompt_text=f"{EVIL}\nBoris", token_ids=[1, 2, 3, 4, 5],
    token_texts=[" has", "<b>", "\n\t", "", "</s>"], why="mrcbm",
    choice_probabilities=[0.9, 0.5, 0.4, 0.3, 0.2], entropies=[0.1, 0.2, 0.3, 0.4, 0.5],
    text=" has<b>", answer="<i>", finish_reason="stop", num_rounds=3, exact_text=EVIL,
    exact_answer="7",
)  # fmt: skip
KEPT = Mismatch(
    prompt=0, position=1, draft_id=2, draft_text="<b>", choice_id=9, choice_text="<i>",
    draft_probability=0.25, choice_probability=0.5, entropy=0.2, entropy_measure="top_3",
    window="completed", refused_by=None, rule="fly", regret=0.6931, budget_left=1.5, context=EVIL,
)  # fmt: skip
REFUSED = dataclasses.replace(
    KEPT, position=2, draft_text="'", regret=None, window="failed", refused_by="window"
)
AUDIT = Audit(Run("fly | <csd>", "top_3", {}), [KEPT, REFUSED], {0: ONE})


class Page(HTMLParser):
    """Every element that was opened, and the text of those of class t within the continuation."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened, self.path = list[tuple[str, dict[str, str | None]]](), list[str]()
        self.tokens, self.shown = list[dict[str, str]](), ""
        self.feed(text)
        self.close()
        assert self.path == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.opened.append((tag, given))
        if tag not in ("meta", "br"):
            self.path.append(given.get("class") or tag)
        if "text" in self.path and self.path[-1].startswith("t "):
            shown = {"letter": self.path[-1].split()[1], "stop": given["tabindex"] or ""}
            self.tokens.append({**shown, "text": "", "tip": ""})

    def handle_endtag(self, tag: str) -> None:
        self.path.pop()

    def handle_data(self, data: str) -> None:
        if "tip" in self.path:
            self.tokens[-1]["tip"] += data
        elif "text" in self.path:
            self.shown += data
            if any(name.startswith("t ") for name in self.path):
                self.tokens[-1]["text"] += data


def test_the_text_is_all_there_and_every_token_tells_why() -> None:
    """Nothing of it is markup, and the page loads and runs nothing."""
    parsed = Page(text := page(AUDIT, 0))
    shown = EVIL.replace("\x1b", "\ufffd")
    assert parsed.shown == f"{shown}\nBoris has<b>\n\t</s>"
    assert [token["text"] for token in parsed.tokens] == [" has", "<b>", "\n\t", "", "</s>"]
    tags = [tag for tag, _ in parsed.opened]
    assert not {"script", "i", "s"} & set(tags)
    assert tags.count("b") == 4 + 5  # the page's own: in the legend, and for each token
    names = {name for _, given in parsed.opened for name in given}
    assert not names & {"src", "href", "srcset", "onclick", "onload"}
    assert not re.search(r"\x1b|url\(|@import|https?:", text)
    assert any("default-src 'none'" in (given.get("content") or "") for _, given in parsed.opened)
    assert "".join(token["letter"] for token in parsed.tokens) == ONE.why
    assert [token["stop"] for token in parsed.tokens] == ["-1", "0", "0", "-1", "-1"]
    matched, rescued, corrected, *_ = (token["tip"] for token in parsed.tokens)
    assert "p = 0.9000" in matched
    for part in ("'<b>'", "p = 0.2500", "'<i>'", "p = 0.5000", "entropy 0.200 (top_3)",
                 "regret 0.693 nats", "completed", "budget left 1.500"):  # fmt: skip
        assert part in rescued
    for part in ("refused by: window", "regret infinite", "failed"):
        assert part in corrected


def test_what_the_target_alone_writes() -> None:
    for words, changed in (
        ("instead of", {}), ("not decoded", {"exact_text": None, "exact_answer": None}),
        ("the same text", {"exact_text": ONE.text}), ("writes another text.</p>", {"answer": None}),
    ):  # fmt: skip
        one = dataclasses.replace(ONE, **changed)
        assert words in page(dataclasses.replace(AUDIT, continuations={0: one}), 0)


def luminance(colour: str) -> float:
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    light = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]


def test_colours_can_be_told_from_their_background() -> None:
    """At least 4.5 to 1, as the Web Content Accessibility Guidelines ask; by day and by night."""
    text = page(AUDIT, 0)
    themes = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", theme))
        pairs = re.findall(r"(\S+)/(\S+)", "ink/page dim/page m/page b/page ink/panel dim/panel")
        for pair in [*pairs, ("r", "r-back"), ("c", "c-back")]:
            dark, light = sorted(luminance(colours[name]) for name in pair)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, pair
    for letter in "rcb":  # and the colour is not all there is
        assert re.search(rf"\.{letter} \{{[^}}]*underline (double|wavy|dotted)", text)
