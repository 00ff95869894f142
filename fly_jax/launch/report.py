"""The command report: results of bench and evaluate, speed beside quality, as one page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fly_jax.errors import FlyJaxError
from fly_jax.launch.flags import Flags, flag_group
from fly_jax.parameters import parameter

_HELP = """\
python -m fly_jax.launch report DIR [flags]

Reads what bench --json and evaluate have written into a folder and those below it, and writes
DIR/report.html, a page that loads nothing, and DIR/report.json: the speed of each decoding beside
what it keeps of the quality, and the items that it has lost and gained, both texts side by side.

Examples:
  python -m fly_jax.launch evaluate --output runs/problems
  python -m fly_jax.launch bench --json > runs/bench.json
  python -m fly_jax.launch report runs --margin 2
"""

_NAME, _BESIDE = "report", "Loosened rules beside what needs none"
_SHOWN = ("score", "retention", "low", "high", "gained", "lost", "verdict", "items_to_decide")
Figures = dict[str, Any]


@flag_group("Report")
class _ReportFlags:
    file: str | None = None
    margin: float = parameter(1.0, "points of the score that may be lost", above=0, below=100)
    items: int = parameter(20, "most items lost, and gained, of a decoding on the page", low=0)
    json: bool = parameter(False, "all figures as one JSON object on standard output")


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    values = Flags("report", _ReportFlags).parse(arguments, _HELP)
    if values.file is None or not (folder := Path(values.file)).is_dir():
        raise FlyJaxError(
            f"report was given {values.file or 'nothing'}; give the folder of files that bench "
            "--json and evaluate have written."
        )

    from fly_jax.evaluation.audit_summary import aligned
    from fly_jax.launch.view import rendered

    runs = _read(folder, values.margin)
    if _NAME in runs.speeds | runs.qualities:
        raise FlyJaxError(
            f"{folder}/{_NAME}.json is a measurement, which the report would replace; rename it."
        )
    qualities, tables = runs.qualities, runs.tables
    speed = [row for name, one in runs.speeds.items() for row in _speed_rows(name, one, qualities)]
    result = {"margin": values.margin, "speed": speed, "quality": qualities}
    (folder / f"{_NAME}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    if speed:
        tables = {"Speed beside quality": _speed_table(speed)} | tables
    given = ((runs.folders[name], name, found["tasks"]) for name, found in qualities.items())
    page = rendered(
        "report.html", title=f"Speed and quality: {folder.resolve().name}", tables=tables,
        machines=runs.machines, is_beside=any(name.startswith(_BESIDE) for name in tables),
        margin=values.margin,
        changed=[change for one in given for change in _changed(*one, values.items)],
    )  # fmt: skip
    path = folder / f"{_NAME}.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    out = sys.stderr if values.json else sys.stdout
    for name, shown in tables.items():
        print(name, "", *aligned(shown, left=(1,)), "", sep="\n", file=out)
    print(f"The page is {path}.", file=out)
    if values.json:
        print(json.dumps(result))


class _Runs(NamedTuple):
    """The files of bench and evaluate by name, the folders of answers, and names by machine."""

    speeds: dict[str, Figures]
    qualities: dict[str, Figures]
    folders: dict[str, Path]
    tables: dict[str, list[list[str]]]
    machines: dict[str, list[str]]


def _read(folder: Path, margin: float) -> _Runs:
    runs = _Runs({}, {}, {}, {}, {})
    for path in sorted(folder.rglob("*.json")):
        name = str(path.relative_to(folder).with_suffix(""))
        try:
            text = path.read_text(encoding="utf-8")
            found = json.loads(text)
            keys = found.keys() if isinstance(found, dict) else set()
            if {"decodings", "turns"} <= keys:
                runs.speeds[name] = found
                list(_speed_rows("", found, {}))
            elif {"tasks", "setting"} <= keys:
                own = path.parent if path.stem == "results" else path.with_suffix("")
                named = folder.resolve().name if own == folder else str(own.relative_to(folder))
                name = name if named in runs.qualities else named
                runs.qualities[name], runs.folders[name] = found, own
                runs.tables.update(_tables(name, found["tasks"], margin))
            else:
                continue
            machine = found["machine"].items()
            told = (f"{key} {', '.join(of) if isinstance(of, list) else of}" for key, of in machine)
            runs.machines.setdefault(", ".join(told), []).append(name)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if getattr(error, "msg", "") == "Extra data" and '"machine"' not in text:
                continue  # JSON lines, which are neither
            raise FlyJaxError(
                f"{path} is no whole file of bench --json or evaluate ({error!r}); measure it "
                "again, or move it elsewhere."
            ) from error
    if not runs.machines:
        said = f"{folder} has no file of bench --json or evaluate"
        raise FlyJaxError(f"{said}; measure something into it first.")
    return runs


def _tables(
    name: str, tasks: Mapping[str, Figures], margin: float
) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields the tables of an evaluation that have a row, judged by the margin."""
    from fly_jax.evaluation.answers import beside_rows, class_rows, compare_decodings, rows

    for one in tasks.values():
        compare_decodings(one, margin)
    by_class = "Rescued tokens by class (mean regret)"
    given = {"Quality": rows, _BESIDE: beside_rows, by_class: class_rows}
    for title, made in given.items():
        if len(shown := made(tasks)) > 1:
            yield f"{title}: {name}", shown


def _speed_rows(
    name: str, found: Figures, qualities: Mapping[str, Figures]
) -> Iterator[dict[str, Any]]:
    """Yields the speeds of one file, each with the quality of the same models and decoding."""
    exact = [of["tokens_per_second"] for key, of in found["decodings"].items() if "exact" in key]
    for decoding, one in found["decodings"].items():
        yield {
            "file": name,
            "decoding": decoding,
            **{key: one[key] for key in ("tokens_per_second", "deviation", "speed_up")},
            "over_tuned_exact": one["tokens_per_second"] / max(exact) if exact else None,
            **{key: one[key] for key in ("mean_accepted_tokens", "rescued_per_100_tokens")},
            "quality": {
                f"{task} ({source})" if len(qualities) > 1 else task: {
                    key: of[decoding].get(key) for key in _SHOWN
                }
                for source, other in qualities.items()
                if all(other[key] == found[key] for key in ("target", "draft", "dtype"))
                and found.get("decoding") in (None, other["setting"].get("decoding"))
                for task, of in other["tasks"].items()
                if decoding in of
            },
        }


def _speed_table(speed: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    from fly_jax.evaluation.answers import kept
    from fly_jax.evaluation.audit_summary import or_dash

    tasks = list(dict.fromkeys(task for one in speed for task in one["quality"]))
    shown = [["file", "decoding", "tokens/s", "speed-up", "over tuned exact", "mean accepted"]]
    shown[0] += [f"{task}{what}" for task in tasks for what in ("", ": retention (95%)")]
    for one in speed:
        several = "" if one["deviation"] is None else f" ± {one['deviation']:.1f}"
        over = or_dash(one["over_tuned_exact"], "{:.2f}x")
        row = [one["file"], one["decoding"], f"{one['tokens_per_second']:.1f}{several}"]
        row += [f"{one['speed_up']:.2f}x", over, f"{one['mean_accepted_tokens']:.2f}"]
        for task in tasks:
            of = one["quality"].get(task)
            row += ["-", "-"] if of is None else [f"{of['score']:.1%}", kept(of)]
        shown.append(row)
    return shown


def _changed(
    folder: Path, source: str, tasks: Mapping[str, Figures], most: int
) -> Iterator[dict[str, Any]]:
    """Yields the items that a decoding lost or gained, with both answers' tokens if there."""
    path = folder / "answers.jsonl"
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    try:
        known = map(json.loads, lines)
        answers = {(one["task"], one["item"], one["decoding"]): one for one in known}
    except (ValueError, LookupError, TypeError) as error:
        raise FlyJaxError(
            f"{path} is damaged ({error!r}); evaluate anew, or move it elsewhere."
        ) from error
    for task, decodings in tasks.items():
        (base, first), *others = decodings.items()
        for name, one in others:
            for kind, now in (("lost", "0"), ("gained", "1")):
                differ = zip(one["items"], first["right"], one["right"], strict=True)
                items = [item for item, was, is_now in differ if was != is_now == now]
                texts = {
                    item: both
                    for item in items[:most]
                    if (both := [
                        list(zip(of["pieces"], of["why"], strict=True))
                        for key in (base, name)
                        if (of := answers.get((task, item, key)))
                    ])
                }  # fmt: skip
                if items:
                    yield {
                        "head": f"{source}, {task}, {name}: {len(items)} {kind}",
                        "columns": (base, name), "texts": texts,
                        "others": [item for item in items if item not in texts],
                    }  # fmt: skip
