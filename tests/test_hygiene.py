"""What is in the repository holds for every reader: no traces of a machine, notebooks in their proper state."""

import re
import subprocess
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
LISTED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
TRACKED = [ROOT / name for name in LISTED if name and (ROOT / name).is_file()]
NOTEBOOKS = [p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
STAGES = [p for p in NOTEBOOKS if p.parent.name == "stages"]
LIBRARY = [p for p in NOTEBOOKS if p not in STAGES]
TRACES = {  # a letter in brackets keeps a pattern from finding itself here
    "a folder of one machine": rb"/(?:home|Users|mnt)/\w|/roo[t]/|(?<![\w.}>)])/wor[k]/\w|/privat[e]/var/|/var/folder[s]/|[\\/]ipykernel_\d|\.venv/li[b]/",
    "a package registry": rb"pypi\.or[g]|python[h]osted|artifactor[y]|nexu[s]\.|index-ur[l]|conda\.anacond[a]\.|download\.pytorc[h]",
    "a memory address": rb" at 0x[0-9a-f]{6}",
    "a secret": rb"AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30}|-----BEGIN [A-Z ]*PRIVATE KEY",
}


@pytest.mark.parametrize("kind", TRACES)
def test_no_trace_of_a_machine(kind):
    pattern = re.compile(TRACES[kind])
    found = []
    for path in TRACKED:
        if path.suffix in {".png", ".jpg", ".gz", ".npz", ".pt", ".safetensors"}:
            continue
        data = path.read_bytes()
        if b"\0" not in data[:1000]:
            data = re.sub(rb'"image/png": "[^"]*"', b"", data)
            found += [f"{path.relative_to(ROOT)}: {m[0].decode()}" for m in pattern.finditer(data)]
    assert not found


def rel(path):
    return str(path.relative_to(ROOT / "nbs"))


@pytest.mark.parametrize("path", STAGES, ids=rel)
def test_stage_notebooks_have_parameters_and_no_outputs(path):
    cells = nbformat.read(path, 4).cells
    assert [cell.metadata.get("tags") for cell in cells if cell.metadata.get("tags")] == [["parameters"]]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert (path.parent / ".notest").exists()


@pytest.mark.parametrize("path", LIBRARY, ids=rel)
def test_library_notebooks_show_their_outputs(path):
    code = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    kinds = {out.output_type for cell in code for out in cell.outputs}
    assert (kinds or not code) and "error" not in kinds
    assert not any(out.get("name") == "stderr" for cell in code for out in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=rel)
def test_notebooks_are_readable(path):
    "A title and a subtitle first, no cell longer than 60 lines, no leftovers in the metadata."
    nb = nbformat.read(path, 4)
    assert re.match(r"# \S.*\n\n> \S", nb.cells[0].source)
    assert not [cell.id for cell in nb.cells if len(cell.source.splitlines()) > 60]
    assert {key for cell in nb.cells for key in cell.metadata} <= {"tags"}
    assert nb.metadata.kernelspec.name == "python3"


def test_no_large_files():
    "Weights and data live in DVC; git holds what people read."
    large = {str(p.relative_to(ROOT)): p.stat().st_size for p in TRACKED if "dvcstore" not in p.parts}
    assert not {name: size for name, size in large.items() if size > 3_000_000}
