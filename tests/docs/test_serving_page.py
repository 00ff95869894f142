"""docs/serving.md and the dashboard name what there is, and the page at / needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fly_jax.decoding.config import RoundSpec, RoundStatic
from fly_jax.engine.depth_costs import DepthCosts
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


def samples() -> set[str]:
    """The names of all samples, and of histograms without their endings."""
    spec = RoundSpec(Exact(), RoundStatic(2, depths=(0, 2)))
    engine: Any = SimpleNamespace(spec=spec, slots=Slots((1,)), num_waiting=0)
    engine.costs = DepthCosts((0, 2))
    text = ServerMetrics(engine).text().decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)", text, re.MULTILINE)
    assert len(families) > 20
    endings = {"counter": ("",), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
    return {name + ending for name, kind in families for ending in endings[kind]}


def test_the_page_and_the_dashboard_have_every_metric() -> None:
    """And no others."""
    metrics = samples()
    listed = set(re.findall(r"^\| `(fly_jax:\w+)`", _PAGE, re.MULTILINE))
    endings = ("_created", "_bucket", "_sum", "_count")
    assert listed == {name for name in metrics if not name.endswith(endings)}
    board = json.loads((_ROOT / "configs" / "grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    asked = {name for query in queries for name in _NAME.findall(query)}
    assert {name for name in metrics if name.endswith("_total")} <= asked <= metrics
    assert all(query.count("(") == query.count(")") for query in queries)
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_flags_and_fields_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.main(["--help"])
    flags = re.findall(r"^  --([a-z_]+)", capsys.readouterr().out, re.MULTILINE)
    # Other tools have flags of their own.
    ours = re.sub(r"^## Other tools\n.*?(?=^## )", "", _PAGE, flags=re.MULTILINE | re.DOTALL)
    assert ours != _PAGE
    named = set(re.findall(r"--([a-z_]+)", ours))
    assert {"num_slots", "max_queue", "grace_period"} <= named <= set(flags)
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields, "stream_options"}
    taken = _PAGE[_PAGE.index("Taken are") : _PAGE.index("The i-th of")]
    assert set(re.findall(r"`([a-z_]+)[`.]", taken)) <= fields
    own = _PAGE[_PAGE.index("## The field `fly`") : _PAGE.index("All rules that requests")]
    found = re.findall(r"^\| `(\w+)`|`([a-z]+_[a-z_]+)`", own, re.MULTILINE)
    assert {"".join(names) for names in found} <= {*FlyFields.model_fields, *VLLM_NAMES}
    flags, limits = serve.ServeFlags, ServerLimits()
    assert (limits.max_queue, limits.max_body) == (flags.max_queue, flags.max_body)


def test_the_page_at_the_root_stands_by_itself() -> None:
    before, script, after = re.split("</?script>", page())
    links = re.findall(r"""\b(?:src|href|action)\s*=\s*["']?([^"'\s>]*)""", before + after)
    assert links == ["data:,"]
    ids = re.findall(r'\bid="(\w+)"', before + after)
    assert len(set(ids)) == len(ids) == (before + after).count(" id=")
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= set(ids)
    assert "http" not in script
    assert "innerHTML" not in script  # what a model writes is text
    for kind in ("matched", "rescued", "corrected", "bonus"):
        assert f'"{kind}": {{"letter"' in script
    assert "--r-back" in page()
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
