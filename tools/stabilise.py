"""Bring an executed notebook into a form that is the same bytes after every run: stabilise.py NOTEBOOK...

Dropped: run times, random ids, memory addresses, paths of this machine, and what went to stderr: progress bars, warnings and
news such as "resuming" belong to one run and its terminal. Kept: code, printed text, tables, pictures.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
KEEP = ("kernelspec", "language_info")
OUTPUT_TEXT = ("text/plain", "text/html", "text/markdown", "text/latex", "image/svg+xml")


def last_states(text: str) -> str:
    "Keep of each line what a terminal shows in the end: what follows the last carriage return."
    return re.sub(r"[^\n]*\r(?!\n)", "", text.replace("\r\n", "\n"))


def clean_text(text: str, root: Path) -> str:
    "Drop memory addresses and the paths of the checkout, the packages and the kernel's temporary files."
    text = re.sub(r"(?:/[^\s/'\":]+(?: [^\s/'\":]+)*)+/site-packages/", "site-packages/", text)
    text = re.sub(r"\S*/ipykernel_\d+/\d+\.py", "cell", text)
    text = text.replace(f"{root}/", "").replace(str(root), ".")
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def clean_outputs(outputs: list, root: Path) -> list:
    "Leave out stderr, merge neighbouring pieces of stdout, and clean all text."
    kept = []
    for out in outputs:
        if out.get("name") == "stderr":
            continue
        if out.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += out.text
        else:
            kept.append(out)
    for out in kept:
        if out.output_type == "stream":
            out.text = clean_text(last_states(out.text), root)
        for kind in set(OUTPUT_TEXT) & set(out.get("data", {})):
            out.data[kind] = clean_text(out.data[kind], root)
        if out.output_type == "error":
            out.traceback = [clean_text(line, root) for line in out.traceback]
        if "metadata" in out:
            out.metadata = {}
    return kept


def stabilise(nb: nbformat.NotebookNode, root: Path = ROOT) -> nbformat.NotebookNode:
    "Clean a notebook in place and return it."
    nb.metadata = nbformat.from_dict({key: nb.metadata[key] for key in KEEP if key in nb.metadata})
    nb.metadata.get("language_info", {}).pop("version", None)
    for number, cell in enumerate(nb.cells):
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if "injected-parameters" in tags:
            cell["id"] = f"injected-{number}"
        if cell.cell_type == "code":
            cell.outputs = clean_outputs(cell.outputs, root)
    return nb


def write(nb: nbformat.NotebookNode, path: Path) -> None:
    "Write a notebook beside `path` and move it there when complete."
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            nbformat.write(nb, file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for argument in sys.argv[1:]:
        write(stabilise(nbformat.read(argument, 4)), Path(argument))
