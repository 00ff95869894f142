"""notebooks/fly_jax_demo.ipynb runs from top to bottom and shows what it promises."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from golden import altered
from launch_types import Folders
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from fly_jax.launch.__main__ import main

_NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "fly_jax_demo.ipynb"
_PROBLEM = {
    "task_id": "HumanEval/0", "prompt": "def first(x):\n", "entry_point": "first",
    "test": "def check(candidate):\n    assert candidate([3, 4]) == 3\n",
}  # fmt: skip
_HANGS = 900  # seconds of one cell; a guard, since the machine may be busy


@pytest.fixture(scope="module")
def executed(chatty_pair: Folders, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    """The notebook after it has run, with this interpreter and one CPU device."""
    folder = tmp_path_factory.mktemp("jupyter")
    (kernel := folder / "kernels" / "python3").mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    description = {"argv": launch, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(description), encoding="utf-8")
    # A pair with room for the questions, in place of the one that the hub has.
    more = {"max_position_embeddings": 1024}
    longer = [str(altered(one, folder / one.name, more, {})) for one in chatty_pair]
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    for cell in notebook.cells:  # all of them take long
        cell.source = cell.source.replace("= built_in_problems()", "= built_in_problems()[:3]")
    notebook.cells += [
        new_code_cell(f"real = fly_jax.load_pair(*{longer})", id="instruct"),
        new_code_cell(cells["real-problems"].source, id="judged"),
        new_code_cell(cells["chat"].source, id="conversation"),
    ]
    (folder / "sets").mkdir()
    (folder / "sets" / "HumanEval.jsonl").write_text(json.dumps(_PROBLEM))
    client = NotebookClient(notebook, timeout=_HANGS, kernel_name="python3")
    own = {"JUPYTER_PATH": folder, "JUPYTER_RUNTIME_DIR": folder / "runtime"}
    own |= {"IPYTHONDIR": folder / "ipython", "HF_HOME": folder / "hub"}  # where no weights are
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (own | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}).items():
            patch.setenv(name, str(value))
        client.execute(cwd=str(folder), env=dict(os.environ))
    return notebook


def _text(notebook: NotebookNode, cell_id: str) -> str:
    """All that a cell has shown: what it printed, and its HTML; warnings are left out."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    shown = [one for one in cell.outputs if one.get("name") != "stderr"]
    return "".join(one.text if "text" in one else one.data.get("text/html", "") for one in shown)


def test_every_cell_runs_and_text_is_coloured(executed: NotebookNode) -> None:
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert len(cells) > 4
    for cell in cells:
        assert cell.execution_count is not None, cell.id
        assert not [output for output in cell.outputs if output.output_type == "error"], cell.id
    assert _text(executed, "mesh") == "1 device (CPU) as mesh 1\n"
    legend, text = _text(executed, "colours").split("<pre", 1)
    letters = re.findall(r'class="why-(\w)"', text)
    assert re.findall(r'class="why-(\w)"', legend) == ["m", "r", "c", "b"]
    assert letters.count("m") > 10
    assert re.findall(r"(\d+) tokens in \d+ passes", text) == [str(len(letters))]
    assert re.findall(r"(\d+) rescued", text) == [str(letters.count("r"))]


def test_the_three_rules_are_compared(executed: NotebookNode) -> None:
    heading, _, *rows = _text(executed, "compare").splitlines()
    assert re.match(r"decoding +tokens/s +speed-up .* retention$", heading)
    cells = [row.split() for row in rows]
    assert [row[0] for row in cells] == ["autoregressive", "exact", "fly"]
    rescued, correct = ([row[column] for row in cells] for column in (-4, -2))
    assert rescued[:2] == ["0", "0"]
    assert int(rescued[2]) > 0
    assert all(re.fullmatch(r"\d/3", cell) for cell in correct)
    assert correct[1] == correct[0], "exact decoding is lossless"


def test_without_a_hub_and_with_a_real_pair(executed: NotebookNode) -> None:
    shown = _text(executed, "real")
    assert shown.count("\n") == 1
    assert "'Qwen/Qwen2.5-Coder-1.5B-Instruct' is no folder that exists" in shown
    assert shown.endswith("The small pair goes on in its place.\n")
    assert _text(executed, "chat").count('class="why-') > 10
    assert _text(executed, "real-problems") == ""
    # A real pair is talked to, and judged on problems.
    shown = _text(executed, "conversation")
    assert "<b>Why is the sky blue?</b>" in shown
    assert shown.count("passes of the target") == shown.count("<b>") == 2
    assert shown.count('class="why-') > 10
    rows = _text(executed, "judged").splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["autoregressive", "exact", "fly"]
    assert all("0/1" in row.split() for row in rows), rows


def test_the_notebook_is_stored_clean(capsys: pytest.CaptureFixture[str]) -> None:
    """And asks the planner by flags that there are; on a CPU, where it runs here, it asks none."""
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), "ids are names, not random"
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)
    lines = "\n".join(cell.source for cell in notebook.cells).splitlines()
    (line,) = (line for line in lines if '"plan"' in line)
    given = re.findall(r'"(--[^"]+)"', line)
    models = [f"--{name}=llama-3.2-1b" for name in ("target", "draft")]
    assert main(("plan", *given, *models, "--chip=v5e", "--mesh=1")) == 0, capsys.readouterr().err
