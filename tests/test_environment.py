"""What conda and pip are told agrees with pyproject.toml."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [s for s in (ROOT / "requirements.lock").read_text().splitlines() if s.strip() and not s.startswith("#")]


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_environment_yml():
    env = yaml.safe_load((ROOT / "environment.yml").read_text())
    plain = [d for d in env["dependencies"] if isinstance(d, str)]
    pip = [d["pip"] for d in env["dependencies"] if isinstance(d, dict)]
    assert pip == [["-e .[dev]"]] and env["name"] == PROJECT["name"]
    python = next(d.split("=")[1] for d in plain if d.startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.0")


def test_lock_has_exact_versions_only():
    "No local paths and no addresses: they exist on one machine."
    wrong = [line for line in LOCK if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", line)]
    names = [canonical(line.split("==")[0]) for line in LOCK]
    assert not wrong and len(names) == len(set(names))


EXTRAS = PROJECT["optional-dependencies"]
WANTED = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(r for group in EXTRAS.values() for r in group)]
    if canonical(Requirement(text).name) != PROJECT["name"]
]


@pytest.mark.parametrize("wanted", WANTED, ids=lambda r: r.name)
def test_lock_covers_the_dependencies(wanted):
    locked = {canonical(line.split("==")[0]): line.split("==")[1] for line in LOCK}
    name = canonical(wanted.name)
    assert name in locked, f"{wanted.name} is not in requirements.lock; see the top of that file"
    assert wanted.specifier.contains(locked[name]), f"requirements.lock has {locked[name]}, pyproject.toml {wanted}"


def test_lock_installs_on_every_python_that_is_promised():
    "A package may want a newer patch release than pyproject.toml promises, and pip then refuses the whole lock."
    promised = [v for v in ("3.11.0", "3.11.2", "3.12.0") if SpecifierSet(PROJECT["requires-python"]).contains(v)]
    locked = {canonical(line.split("==")[0]): line.split("==")[1] for line in LOCK}
    strict, seen = [], 0
    for package in distributions():
        name = canonical(package.metadata["Name"])
        if locked.get(name) == package.version:
            seen += 1
            wants = SpecifierSet(package.metadata.get("Requires-Python") or "")
            strict += [f"{name} {wants}: not {version}" for version in promised if not wants.contains(version)]
    assert seen > 100 and not strict
