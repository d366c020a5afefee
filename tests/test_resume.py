"""A training process that is stopped or killed at any step, and started again, ends with the same bytes."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys, time, torch
from torch import nn
from afno.core import generator, seed_everything
from afno.train import TrainSettings, fit

folder, pause = sys.argv[1], float(sys.argv[2])

class Pairs:
    def __len__(self): return 48
    def __getitem__(self, place):
        x = torch.randn(6, generator=generator("item", *place))
        return x, x.flip(0)

def loss(model, batch, step):
    print(step.index, flush=True)
    time.sleep(pause)
    keep = torch.rand(step.batch_size, 6, generator=step.generator("keep")) > 0.1
    return (model(batch[0] * keep) - batch[1]).square().mean()

seed_everything(3, "weights")
model = nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 6))
settings = TrainSettings(epochs=10, batch_size=8, lr=0.01, warmup_steps=6, save_every=4, log_every=5)
probes = {"size": lambda model, batch: model[0].weight.abs().mean()}
history = fit(model, loss, Pairs(), settings, folder + "/out", folder + "/resume", seed=3, probes=probes, name="tiny")
print("resumed at", history.resumed_at, flush=True)
"""


def start(folder: Path, pause: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, str(folder), str(pause)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}  # bits are promised on a CPU
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(folder: Path) -> tuple[int, str]:
    "Run to the end; return the step it began at, and what it said."
    process = start(folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return int(out.split()[-1]), err


def stop_at(folder: Path, step: int, number: int) -> tuple[int, str]:
    "Send a signal once `step` has begun; return the exit code and the last line of stderr."
    process = start(folder, pause=0.05)
    for line in process.stdout:
        if int(line) == step:
            break
    process.send_signal(number)
    process.stdout.read()  # drains the pipe until the process ends
    err = process.stderr.read()
    return process.wait(timeout=60), err.strip().splitlines()[-1] if err.strip() else ""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert finish(folder)[0] == 0
    return folder / "out"


def assert_same(out: Path, whole: Path) -> None:
    for name in ("model.pt", "log.csv"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(p.name for p in out.iterdir()) == ["log.csv", "model.pt"]


def test_stopped_and_killed_at_any_step_gives_the_same_bytes(tmp_path, whole):
    steps = sorted(random.sample(range(5, 55), 3))  # really random: any step must do
    print("signals at steps", steps)
    state = tmp_path / "resume/state.pt"
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]
    random.shuffle(signals)
    for step, number in zip(steps, signals, strict=True):
        code, last = stop_at(tmp_path, step, number)
        assert code != 0
        done = torch.load(state, weights_only=True)["done"]
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL and step - 4 <= done <= step + 2
        else:
            assert done in (step + 1, step + 2)  # the step in progress finished, the pipe may lag by one
            assert last.endswith(f"interrupted at step {done} of 60; run the same command again to resume"), last
        assert not (tmp_path / "out/model.pt").exists()
    began, said = finish(tmp_path)
    assert began == done
    assert "stale" not in said
    assert_same(tmp_path / "out", whole)
    assert sorted(p.name for p in (tmp_path / "resume").iterdir()) == ["lock"]


def test_a_second_process_waits_then_continues_where_the_first_stopped(tmp_path, whole):
    first = start(tmp_path, pause=0.3)
    while int(first.stdout.readline()) < 6:
        pass
    (tmp_path / "resume/.state.pt.half").write_bytes(b"a write that was killed")
    (tmp_path / "out/log.csv").write_text("step,epoch\n1,0.1\n2,0.")
    second = start(tmp_path)
    line = second.stderr.readline()
    assert line == f"process {first.pid} is training this run; waiting up to 20 s for it to end\n"
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode != 0
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert int(out.split()[-1]) >= 7
    assert_same(tmp_path / "out", whole)
    assert [p.name for p in (tmp_path / "resume").iterdir()] == ["lock"]
