from __future__ import annotations

import io

import pytest
from launch_types import Patch

from fly_jax.launch.view import TextView, legend, wants_colour
from fly_jax.verification.rules import Why


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: Patch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_colours_tell_why() -> None:
    out = Terminal()
    view = TextView(out)
    assert out.getvalue() == f"{legend()}\n\n"
    out.seek(0)
    out.truncate()
    view.begin(["x"])
    why = [Why.MATCHED, Why.RESCUED, Why.CORRECTED, Why.BONUS]
    view.push(0, "0123", why, done=True)
    pieces = [part.partition("m") for part in out.getvalue().split("\x1b[")]
    styles = {text: style for style, _, text in pieces if text.strip()}
    assert styles.keys() == {"x", "0", "1", "2", "3"}
    assert len(set(styles.values())) == 5
    for text in "0123":
        assert f"\x1b[{styles[text]}m" in legend()


def test_no_colour_where_none_is_wanted(monkeypatch: Patch) -> None:
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())


def test_a_terminal_gets_no_control_characters_of_the_models(monkeypatch: Patch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        view = TextView(out)
        view.begin(["x\x07\ty"])
        view.push(0, "\x1b[2J", [Why.BONUS] * 4, done=True)
    assert terminal.getvalue() == "x\ufffd\ty\ufffd[2J\n\n"
    assert file.getvalue() == "x\x07\ty\x1b[2J\n\n"


def test_rows_come_one_after_the_other() -> None:
    """The first unfinished row is written as it grows; the others wait."""
    out = io.StringIO()
    view = TextView(out)

    def push(row: int, text: str, *, done: bool = False) -> None:
        view.push(row, text, [Why.BONUS], done=done)
        for ended in view.ended():
            out.write(f"<{ended}>")

    view.begin(["a", "b", "c"])
    push(1, "2")
    assert out.getvalue() == "a"
    push(0, "1")
    assert out.getvalue() == "a1"
    push(2, "3", done=True)
    push(0, "1", done=True)
    assert out.getvalue() == "a11\n\n<0>b2"
    push(1, "2", done=True)
    assert out.getvalue() == "a11\n\n<0>b22\n\n<1>c3\n\n<2>"
