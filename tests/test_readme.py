"""README.md is what nbs/index.ipynb says, and its first code runs."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from readme import NOTE, render  # noqa: E402

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
INDEX = [path for path in [ROOT / "nbs/index.ipynb"] if path.exists()]


@pytest.mark.parametrize("code", BLOCKS[:1], ids=["first"] * len(BLOCKS[:1]))
def test_first_code_runs(code, tmp_path):
    "As a reader would: in another folder, with nothing but the package."
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("path", INDEX, ids=lambda path: path.stem)
def test_readme_is_the_index(path):
    assert render(nbformat.read(path, 4)) == TEXT, "run `make export`"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)\s#]+)[^)]*\)", TEXT))))
def test_links_lead_somewhere(target):
    assert re.match(r"https?://", target) or (ROOT / target).exists()


def test_render():
    "Text, code and text outputs, with links that hold from the repository's root."
    code = new_code_cell("#| eval: false\n1 + 1", outputs=[new_output("execute_result", data={"text/plain": "2"})])
    text = new_markdown_cell("# A\n[b](01_b.ipynb), ![c](../results/c.png), [d](https://e.f), [g](#g)")
    found = render(new_notebook(cells=[text, code, new_code_cell("#| hide\n3")]))
    assert found == NOTE + (
        "# A\n[b](nbs/01_b.ipynb), ![c](results/c.png), [d](https://e.f), [g](#g)\n\n"
        "```python\n1 + 1\n```\n\n```text\n2\n```\n"
    )
