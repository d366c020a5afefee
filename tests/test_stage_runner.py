"""The runner of stage notebooks, on toy notebooks in a folder with a space in its name."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parents[1]
SAVE = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path("saved").write_text("all of it")
"""


@pytest.fixture
def repo(tmp_path):
    "A repository with toy stages, its runner, and nothing else."
    repo = tmp_path / "a b"
    (repo / "nbs/stages").mkdir(parents=True)
    (repo / "tools").mkdir()
    (repo / "params.yaml").write_text("tier: smoke\n")
    for name in ("stage.py", "stabilise.py"):
        shutil.copy(ROOT / "tools" / name, repo / "tools")
    return repo


def stage(repo, name, *cells, tag="parameters"):
    "Write a toy stage: a cell of parameters and `cells`."
    nb = new_notebook(cells=[new_markdown_cell(f"# {name}"), *map(new_code_cell, cells)])
    nb.cells[1].metadata["tags"] = [tag]
    nb.metadata["kernelspec"] = {"display_name": "python3", "language": "python", "name": "python3"}
    nbformat.write(nb, repo / f"nbs/stages/{name}.ipynb")


def command(*args):
    return [sys.executable, "tools/stage.py", *args]


def run(repo, *args, **kwargs):
    return subprocess.run(command(*args), cwd=repo, capture_output=True, text=True, timeout=100, **kwargs)


def wait_for(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def started(repo):
    "Wait until the toy stage runs; its kernel."
    wait_for(lambda: (repo / "pid").exists() and (repo / "pid").read_text())
    return psutil.Process(int((repo / "pid").read_text()))


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


PARAMETERS = (
    'tier: str = "smoke"\nname: str = "afno"  # µ, a name\nseed: int = 0\nlr: float = 0.1\nsteps: int | None = None'
)


@pytest.mark.parametrize(
    "args, words",
    [
        (["-p", "sed=1"], ["'sed'", "tier, name, seed, lr, steps"]),
        (["-p", "seed=x"], ["seed=x", "str", "int"]),
        (["-p", "seed=true"], ["bool", "int"]),
        (["-p", "lr=1e-3"], ["float", "0.001"]),
        (["-p", "steps=1.5"], ["float", "int | None"]),
        (["-p", "seed"], ["-p seed", "name=value"]),
        (["--tier", "small"], ["small", "smoke", "make repro TIER=small"]),
        (["--out", "x.txt"], [".ipynb"]),
    ],
)
def test_refuses(repo, args, words):
    stage(repo, "toy", PARAMETERS, "1")
    found = run(repo, "toy", *args)
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1 and all(word in found.stderr for word in words), found.stderr
    assert not (repo / "reports").exists()


def test_refuses_unknown_stage_and_missing_tag(repo):
    stage(repo, "toy", PARAMETERS, tag="other")
    assert "stages are toy" in run(repo, "nope").stderr
    assert "no cell tagged 'parameters'" in run(repo, "toy").stderr


def test_two_runs_give_the_same_bytes(repo):
    "Values arrive with their types, the output streams, and times, bars, addresses and paths do not reach the file."
    stage(
        repo,
        "toy",
        PARAMETERS,
        "import os, sys, time, tqdm, warnings\nfor _ in tqdm.trange(3): time.sleep(0.02)\n"
        "print(os.getcwd(), object()); warnings.warn('look out'); print(time.time(), file=open('stamp', 'w'))",
        "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show(); (tier, name, seed, lr, steps)",
    )
    args = ["toy", "-p", "seed=3", "-p", "name=no", "-p", "lr=1", "-p", "steps=null", "--out", "reports/x.ipynb"]
    found = run(repo, *args)
    assert found.returncode == 0, found.stderr
    assert (
        str(repo) in found.stdout and "3/3" in found.stderr and "look out" in found.stderr
    )  # the terminal sees all of it
    first = (repo / "reports/x.ipynb").read_bytes()
    assert run(repo, *args, env=os.environ | {"MPLBACKEND": "agg"}).returncode == 0
    assert (repo / "reports/x.ipynb").read_bytes() == first
    text = first.decode()
    assert "image/png" in text and "object object" in text
    assert not any(word in text for word in (str(repo), " at 0x", "it/s", "stderr", "execution_timing", "duration"))
    assert json.loads(first)["cells"][-1]["outputs"][-1]["data"]["text/plain"] == ["('smoke', 'no', 3, 1.0, None)"]
    assert [p.name for p in (repo / "reports").iterdir()] == ["x.ipynb"]


def test_failing_cell_is_one_line_and_keeps_the_good_notebook(repo):
    stage(repo, "toy", PARAMETERS, "if seed: raise ValueError('bad\\nluck')")
    assert run(repo, "toy", "--out", "x.ipynb").returncode == 0
    good = (repo / "x.ipynb").read_bytes()
    found = run(repo, "toy", "-p", "seed=1", "--out", "x.ipynb")
    assert found.returncode == 1
    assert found.stderr == "stage toy failed: ValueError: bad luck (full log: x.failed.ipynb)\n"
    assert (repo / "x.ipynb").read_bytes() == good and "luck" in (repo / "x.failed.ipynb").read_text()


def test_dead_kernel_is_one_line(repo):
    stage(repo, "toy", PARAMETERS, "import os; os.kill(os.getpid(), 9)")
    found = run(repo, "toy")
    assert found.returncode == 1 and len(found.stderr.splitlines()) == 1 and "out of memory" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_the_notebook(repo, number):
    "The notebook saves its state; no later cell runs, even where the notebook swallows the interrupt."
    stage(repo, "toy", PARAMETERS, SAVE, "pathlib.Path('went_on').touch()")
    runner = subprocess.Popen(command("toy"), cwd=repo, stderr=subprocess.PIPE, text=True)
    kernel = started(repo)
    runner.send_signal(number)
    _, errors = runner.communicate(timeout=40)
    assert runner.returncode == 128 + number
    assert errors.endswith("interrupted; run the same command again to resume\n") and "Traceback" not in errors
    assert (repo / "saved").read_text() == "all of it" and not (repo / "went_on").exists()
    assert gone(kernel)


def test_second_signal_ends_it(repo):
    stage(repo, "toy", PARAMETERS, SAVE.replace("sleep(1)", "sleep(50)"))
    runner = subprocess.Popen(command("toy"), cwd=repo)
    kernel = started(repo)
    runner.terminate()
    time.sleep(0.5)
    assert not gone(kernel)
    runner.terminate()
    assert runner.wait(timeout=20) == 143 and gone(kernel) and not (repo / "saved").exists()


def test_killed_runner_takes_the_kernel_along(repo):
    stage(repo, "toy", PARAMETERS, SAVE)
    runner = subprocess.Popen(command("toy"), cwd=repo)
    kernel = started(repo)
    runner.kill()
    runner.wait()
    wait_for(lambda: gone(kernel), 5)
    assert not (repo / "saved").exists()


@pytest.mark.parametrize("shell", ["exec {}", "{}; true"])  # with the shell that DVC uses as parent or in between
def test_dead_dvc_stops_the_notebook(repo, shell):
    stage(repo, "toy", PARAMETERS, SAVE)
    script = shell.format(shlex.join(command("toy")))
    code = f"import subprocess; subprocess.run(['/bin/sh', '-c', {script!r}])"
    dvc = subprocess.Popen([sys.executable, "-c", code], cwd=repo, env=os.environ | {"DVC_STAGE": "toy"})
    kernel = started(repo)
    dvc.kill()
    dvc.wait()
    wait_for((repo / "saved").exists, 10)
    wait_for(lambda: gone(kernel), 10)


def test_bare_python_finds_the_environment(repo):
    "A Python without packages continues in the environment beside the notebooks, or says what to do."
    stage(repo, "toy", PARAMETERS, "import sys; print(sys.executable)")
    bare = [shutil.which("python3", path=os.defpath) or sys.executable, "-S", "-E", "tools/stage.py", "toy"]
    found = subprocess.run(bare, cwd=repo, capture_output=True, text=True)
    assert found.returncode == 1 and "make setup" in found.stderr
    (repo / ".venv/bin").mkdir(parents=True)
    (repo / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (repo / ".venv/bin/python").chmod(0o755)
    found = subprocess.run(bare, cwd=repo, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.strip() == sys.executable, found.stderr
