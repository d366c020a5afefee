"""Each notebook of the library, the tutorials and the explanations runs from top to bottom: one test each.

Each runs in a kernel of its own and in its own folder, as it does for a reader; cells marked `#| slow`, `#| cuda` or
`#| notest` wait for the slow suite, a GPU, or nobody. (`nbdev-test` runs cells outside the main thread, where notebooks
about signals cannot work.) Stage notebooks, in folders with a `.notest` file, run in the pipeline.
"""

import re
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    path
    for path in (ROOT / "nbs").rglob("*.ipynb")
    if not (path.parent / ".notest").exists() and ".ipynb_checkpoints" not in path.parts
)


def flags(cell):
    "List the marks of a cell that decide whether it runs."
    if cell.cell_type != "code":
        return set()
    if re.search(r"^#\| *eval: *false", cell.source, re.M):
        return {"notest"}
    return set(re.findall(r"^#\| *(notest|slow|cuda)\b", cell.source, re.M))


def run(path, folder, monkeypatch, allowed=frozenset()):
    "Run a notebook with the cells whose marks are `allowed`, and those without marks."
    names = {
        "IPYTHONDIR": str(folder),
        "JUPYTER_RUNTIME_DIR": str(folder),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "IN_TEST": "1",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)
    nb = nbformat.read(path, 4)
    nb.cells = [cell for cell in nb.cells if cell.cell_type == "code" and flags(cell) <= allowed]
    client = NotebookClient(
        nb,
        kernel_name="python3",
        timeout=1200,
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=CRITICAL", "--HistoryManager.enabled=False"],
    )
    try:
        client.execute()
    except CellExecutionError as error:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        pytest.fail(f"{path.relative_to(ROOT)}\n{plain[-4000:]}", pytrace=False)
    assert any(cell.execution_count for cell in nb.cells) or not nb.cells


def marked(flag):
    "List the notebooks that have cells marked `flag`."
    return [p for p in NOTEBOOKS if any(flag in flags(cell) for cell in nbformat.read(p, 4).cells)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch):
    run(path, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("path", marked("slow"), ids=lambda path: path.stem)
def test_notebook_with_its_slow_cells(path, tmp_path, monkeypatch):
    run(path, tmp_path, monkeypatch, {"slow"})


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("path", marked("cuda"), ids=lambda path: path.stem)
def test_notebook_with_its_cuda_cells(path, tmp_path, monkeypatch):
    run(path, tmp_path, monkeypatch, {"slow", "cuda"})
