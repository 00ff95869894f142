"""docs/serving.md and the dashboard name what there is, and the page at / needs nothing else."""

from __future__ import annotations

import json
import re
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import cast

import pytest

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.engine.depth_costs import DepthCosts
from fly_jax.engine.engine import Engine
from fly_jax.engine.slots import Slots
from fly_jax.launch import serve
from fly_jax.serving.http.app import HEADERS, page
from fly_jax.serving.http.limits import ServerLimits
from fly_jax.serving.http.metrics import ServerMetrics
from fly_jax.serving.http.protocol import ChatRequest, CompletionRequest, FlyFields
from fly_jax.verification.rules import VLLM_NAMES, Exact

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
_NAME = re.compile(r"fly_jax:\w+")


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The names of all samples, and of histograms without their endings."""
    spec = RoundSpec(Exact(), RoundStatic(2, depths=(0, 2)))
    costs = DepthCosts((0, 2))
    engine = types.SimpleNamespace(spec=spec, slots=Slots((1,)), num_waiting=0, costs=costs)
    text = ServerMetrics(cast(Engine, engine)).text().decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)", text, re.MULTILINE)
    assert len(families) > 20
    endings = {"counter": ("",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
    return {name + ending for name, kind in families for ending in endings[kind]}


def test_the_page_has_every_metric(metrics: set[str]) -> None:
    listed = set(re.findall(r"^\| `(fly_jax:\w+)`", _PAGE, re.MULTILINE))
    own = {name for name in metrics if not name.endswith(("_created", "_bucket", "_sum", "_count"))}
    assert listed == own


def test_the_dashboard_asks_for_metrics_that_exist(metrics: set[str]) -> None:
    board = json.loads((_ROOT / "configs" / "grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    asked = {name for query in queries for name in _NAME.findall(query)}
    assert asked <= metrics
    counters = {name for name in metrics if name.endswith("_total")}
    assert counters <= asked
    for query in queries:
        assert query.count("(") == query.count(")")
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_flags_and_fields_exist(capsys: pytest.CaptureFixture[str]) -> None:
    serve.main(["--help"])
    flags = re.findall(r"^  --([a-z_]+)", capsys.readouterr().out, re.MULTILINE)
    # Other tools have flags of their own.
    ours = re.sub(r"^## Other tools\n.*?(?=^## )", "", _PAGE, flags=re.MULTILINE | re.DOTALL)
    assert ours != _PAGE
    for name in re.findall(r"--([a-z_]+)", ours):
        assert name in flags, name
    assert {"num_slots", "max_queue", "grace_period"} <= set(re.findall(r"--([a-z_]+)", _PAGE))
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, "stream_options"}
    taken = _PAGE[_PAGE.index("Taken are") : _PAGE.index("The i-th of")]
    for name in re.findall(r"`([a-z_]+)[`.]", taken):
        assert name in fields, name
    own = _PAGE[_PAGE.index("## The field `fly`") : _PAGE.index("All rules that requests")]
    for name in re.findall(r"^\| `(\w+)`|`([a-z]+_[a-z_]+)`", own, re.MULTILINE):
        assert (name[0] or name[1]) in {*FlyFields.model_fields, *VLLM_NAMES}, name
    assert ServerLimits().max_queue == serve.ServeFlags.max_queue
    assert ServerLimits().max_body == serve.ServeFlags.max_body


class _Seen(HTMLParser):
    """Ids, and everything that a page names from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        self.links += [given[name] or "" for name in ("src", "href", "action") if name in given]
        self._in_script = tag == "script"

    def handle_data(self, data: str) -> None:
        self.scripts += [data] if self._in_script else []


def test_the_page_at_the_root_stands_by_itself() -> None:
    seen = _Seen()
    seen.feed(page())
    assert seen.links == ["data:,"]
    assert len(set(seen.ids)) == len(seen.ids)
    (script,) = [one for one in seen.scripts if one.strip()]
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= set(seen.ids)
    assert "http" not in script
    assert "innerHTML" not in script  # what a model writes is text
    for kind in ("matched", "rescued", "corrected", "bonus"):
        assert f'"{kind}": {{"letter"' in script
    assert "--r-back" in page()
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
