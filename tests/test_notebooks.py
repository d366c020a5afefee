"""Each notebook of the library, the tutorials and the explanations runs from top to bottom: one test each.

Each has a process of its own, as it has for a reader. Stage notebooks (folders with a `.notest` file) run in the pipeline.
"""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(
    path
    for path in (ROOT / "nbs").rglob("*.ipynb")
    if not (path.parent / ".notest").exists()
    and not path.name.startswith("_")
    and ".ipynb_checkpoints" not in path.parts
)
RUN = """
import os, sys
os.environ.setdefault("MPLBACKEND", "agg")
from nbdev.config import get_config
from nbdev.test import test_nb
root, path, *force = sys.argv[1:]
skip = list(get_config(root).tst_flags)
done, _ = test_nb(path, skip_flags=skip, force_flags=force, basepath=root)
sys.exit(not done)
"""


def run(path, *flags):
    "Run a notebook in its folder as nbdev-test does, with the cells marked by `flags`."
    command = [sys.executable, "-c", RUN, str(ROOT), str(path), *flags]
    found = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=1800)
    assert found.returncode == 0, f"{path.relative_to(ROOT)}\n{found.stderr[-6000:]}"


def has(path, flag):
    "Say whether some cell is marked `#| flag`."
    return any(f"#| {flag}" in cell.source.splitlines() for cell in nbformat.read(path, 4).cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    run(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if has(p, "slow")], ids=lambda path: path.stem)
def test_notebook_with_its_slow_cells(path):
    run(path, "slow")
