"""Make README.md from nbs/index.ipynb, without Quarto: readme.py [--check]

Text cells are taken as they are, code cells become fenced blocks, their text outputs follow. `#| hide` leaves a cell out.
Links in the notebook are relative to nbs/ and are rewritten to be relative to the repository.
"""

import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Made from nbs/index.ipynb by `make export`; edit that. -->\n\n"


def relink(text: str) -> str:
    "Rewrite links and pictures: relative to nbs/ in the notebook, to the repository's root in README.md."

    def fix(match):
        target = match[2]
        if re.match(r"[a-z]+:|#|/", target):
            return match[0]
        return match[1] + (target[3:] if target.startswith("../") else f"nbs/{target.removeprefix('./')}") + match[3]

    text = re.sub(r"(\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))", fix, text)
    return re.sub(r"(<img [^>]*src=\")([^\"]+)(\")", fix, text)


def outputs(cell: nbformat.NotebookNode) -> list:
    "Turn the outputs of a code cell into Markdown."
    found = []
    for out in cell.outputs:
        data = out.get("data", {})
        if out.output_type == "error" or any(kind.startswith("image/") for kind in data):
            raise SystemExit(
                f"nbs/index.ipynb: cell {cell.id} shows an {'error' if not data else 'image'}; link a file of results/ instead"
            )
        if "text/markdown" in data:
            found.append(relink(data["text/markdown"]))
        elif out.output_type == "stream" or "text/plain" in data:
            text = out.text if out.output_type == "stream" else data["text/plain"]
            found.append(f"```text\n{text.rstrip()}\n```")
    return found


def render(nb: nbformat.NotebookNode) -> str:
    "Render a notebook as Markdown."
    parts = []
    for cell in nb.cells:
        lines = cell.source.split("\n")
        directives = {line.removeprefix("#|").strip().split(":")[0] for line in lines if line.startswith("#|")}
        code = "\n".join(line for line in lines if not line.startswith("#|")).strip()
        if directives & {"hide", "default_exp"} or not code:
            continue
        if cell.cell_type == "markdown":
            parts.append(relink(code))
        elif cell.cell_type == "code":
            parts += [f"```python\n{code}\n```"] if "echo" not in directives else []
            parts += outputs(cell)
    return NOTE + "\n\n".join(parts) + "\n"


def main() -> int:
    "Write README.md, or with --check say whether it is right."
    source, target = ROOT / "nbs/index.ipynb", ROOT / "README.md"
    if not source.exists():
        print("there is no nbs/index.ipynb; README.md stays as it is")
        return 0
    text = render(nbformat.read(source, 4))
    if "--check" in sys.argv:
        same = target.exists() and target.read_text() == text
        print("README.md is nbs/index.ipynb" if same else "README.md differs from nbs/index.ipynb; run `make export`")
        return not same
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
