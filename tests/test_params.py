"""The parameter files of all tiers have one schema, explain themselves, and are what the code reads."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
import yaml

from afno.core import load_params

ROOT = Path(__file__).parents[1]
TIERS = ["smoke", "small", "paper"]
TEXT = {tier: (ROOT / f"params/{tier}.yaml").read_text() for tier in TIERS}
VALUES = {tier: yaml.safe_load(TEXT[tier]) for tier in TIERS}
FREE = re.compile(
    r"(mixers\.\w+\.settings|segment\.mixer_settings)$"
)  # a mixer's own settings, checked by its constructor


def leaves(value, path=""):
    "List the dotted names and the values below `value`."
    if isinstance(value, dict) and not FREE.search(path):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, f"{path}.{key}".strip("."))]
    return [(path, value)]


def kind(value):
    "Name the type of a value; whole numbers may stand for floats."
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def test_tiers_are_these():
    assert sorted(path.stem for path in (ROOT / "params").glob("*.yaml")) == sorted(TIERS)
    assert [VALUES[tier]["tier"] for tier in TIERS] == TIERS


@pytest.mark.parametrize("tier", TIERS[1:])
def test_one_schema(tier):
    first, other = dict(leaves(VALUES["smoke"])), dict(leaves(VALUES[tier]))
    assert list(first) == list(other)
    assert not {
        name: (first[name], other[name])
        for name in first
        if None not in (first[name], other[name]) and kind(first[name]) != kind(other[name])
    }


@pytest.mark.parametrize("tier", TIERS)
def test_every_value_is_explained(tier):
    "A comment says the unit and where the value comes from."
    bare = [line for line in TEXT[tier].splitlines() if re.match(r"\s*\w+:\s+[^#\s]", line) and "  # " not in line]
    assert not bare


@pytest.mark.parametrize("tier", TIERS)
def test_no_number_is_read_as_text(tier):
    "YAML reads 1e-3 as text."
    numbers = re.compile(r"[-+]?\d[\d_]*\.?\d*([eE][-+]?\d+)?")
    texts = [(name, v) for name, v in leaves(VALUES[tier]) if isinstance(v, str) and numbers.fullmatch(v)]
    assert not texts


def test_committed_params_are_those_of_a_tier():
    "What is committed as params.yaml is one of the tier files (your own edits are yours)."
    found = subprocess.run(["git", "show", ":params.yaml"], cwd=ROOT, capture_output=True, text=True)
    text = found.stdout if found.returncode == 0 else (ROOT / "params.yaml").read_text()
    fits = any(
        text == one for one in TEXT.values()
    )  # not compared inside assert: pytest would spend minutes on the difference
    assert fits, "params.yaml as committed is no copy of a file in params/: cp params/smoke.yaml params.yaml"


def loads():
    "Find what the stage notebooks load: (section, module, class)."
    for path in sorted((ROOT / "nbs/stages").glob("*.ipynb")):
        tree = ast.parse("\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"))
        nodes = list(ast.walk(tree))
        origin = {a.asname or a.name: n.module for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "load_params" and len(node.args) > 1:
                section = ast.unparse(node.args[0]).lstrip("f").strip("'\"")
                yield section, origin[node.args[1].id], node.args[1].id


LOADS = sorted(set(loads()))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("section, module, name", LOADS, ids=lambda text: text)
def test_sections_load(tier, section, module, name):
    "Each section that a stage reads has the names and types of its dataclass."
    schema = getattr(importlib.import_module(module), name)
    top = section.split(".")[0]
    sections = [f"{top}.{key}" for key in VALUES[tier][top]] if "{" in section else [section]
    for part in sections:
        load_params(part, schema, path=ROOT / f"params/{tier}.yaml")
