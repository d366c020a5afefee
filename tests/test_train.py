"""The training loop: items of a step, groups, schedule, log, clipping, precision, refusals, one process or two."""

import builtins
import csv
import dataclasses
import importlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from afno.core import generator, seed_everything
from afno.mixers.base import build_mixer
from afno.train import Interrupted, TrainSettings, build_optimizer, fit, learning_rate, param_groups, source_fingerprint
from afno.train.checkpoint import run_lock
from afno.train.loop import Batches, Step
from afno.train.optim import undecayed

os.environ.setdefault(
    "ACCELERATE_USE_CPU", "1"
)  # here equal bits are expected; `cuda` tests start processes of their own


class Pairs(Dataset):
    def __init__(self, size=40):
        self.x = torch.randn(size, 4, generator=generator("x"))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        index, draw = place
        return self.x[index], self.x[index].flip(0) + 0.1 * torch.randn(4, generator=generator("noise", index, draw))


def new_model(dropout=0.1):
    seed_everything("weights")
    return nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4))


def masked_loss(model, batch, step: Step):
    "A loss that draws: once for the whole batch, and once per position."
    x, y = batch
    keep = (torch.rand(step.batch_size, 4, generator=step.generator("mask")) > 0.2)[step.positions]
    scale = torch.stack([torch.rand(1, generator=step.generator("scale", p)) + 0.5 for p in step.positions])
    return ((model(x * keep.to(x.device)) - y).square().mean(1) * scale[:, 0].to(x.device)).mean()


SETTINGS = TrainSettings(epochs=6, batch_size=8, lr=0.01, warmup_steps=5, save_every=7, log_every=4)


def weights(path):
    return torch.load(path, weights_only=True)


# --- Items ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, batch, parts", [(17, 4, 2), (40, 8, 4), (8, 8, 8), (9, 3, 1)])
def test_parts_of_processes_are_the_batch_of_one(size, batch, parts):
    whole = list(Batches(size, batch, 3, seed=5))
    assert len(whole) == 3 * (size // batch)
    split = [list(Batches(size, batch, 3, seed=5, part=(i, parts))) for i in range(parts)]
    for step, items in enumerate(whole):
        assert list(itertools.chain(*(s[step] for s in split))) == items
        epoch = step // (size // batch)
        assert {draw for _, draw in items} == {epoch}
    for epoch in range(3):
        seen = [i for items in whole[epoch * (size // batch) : (epoch + 1) * (size // batch)] for i, _ in items]
        assert len(set(seen)) == len(seen) and set(seen) <= set(range(size))


def test_items_do_not_depend_on_where_one_starts():
    whole = list(Batches(17, 4, 3, seed=5))
    for start in range(len(whole) + 1):
        assert list(Batches(17, 4, 3, seed=5, start=start)) == whole[start:]


def test_loss_is_given_the_items_of_its_step(tmp_path):
    seen, data = [], Pairs()

    def spy(model, batch, step):
        seen.append((step.index, step.epoch, list(step.positions), batch[0].clone()))
        return masked_loss(model, batch, step)

    fit(new_model(), spy, data, SETTINGS, tmp_path, progress=False)
    for step, items in enumerate(Batches(40, 8, 6, seed=0)):
        index, epoch, positions, x = seen[step]
        assert (index, epoch, positions) == (step, step // 5, list(range(8)))
        assert torch.equal(x, torch.stack([data[item][0] for item in items]))


# --- Groups and schedule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["attention", "longshort", "gfn", "afno"])
def test_every_parameter_is_in_one_group(mixer):
    importlib.import_module(f"afno.mixers.{mixer}")
    settings = {"num_heads": 2} if mixer in ("attention", "longshort") else {}
    layer = build_mixer(mixer, 8, grid=(4, 4), **settings)
    model = nn.Sequential(nn.Conv2d(3, 8, 4), nn.LayerNorm(8), layer, nn.Linear(8, 8), nn.BatchNorm2d(4))
    model.register_parameter("pos_embed", nn.Parameter(torch.zeros(1, 4, 4, 8)))
    groups = param_groups(model, 0.05)
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    decay = {name for name, _ in groups[0]["params"]}
    assert groups[0]["weight_decay"] == 0.05 and groups[1]["weight_decay"] == 0
    for name, p in model.named_parameters():
        last = name.split(".")[-1]
        spared = p.ndim < 2 or last in ("b1", "b2") or last.endswith("bias") or "pos_embed" in name
        assert (name not in decay) == spared, name


def test_frozen_parameters_are_left_out():
    model = new_model()
    model[0].requires_grad_(False)
    assert "0.weight" not in [name for group in param_groups(model, 0.1) for name, _ in group["params"]]
    assert "0.bias" in undecayed(model)


@pytest.mark.parametrize("kind, cls", [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_optimizer_is_torchs(kind, cls):
    assert type(build_optimizer(new_model(), TrainSettings(1, 1, kind))) is cls


def test_rate_by_hand():
    s = TrainSettings(1, 1, lr=1.0, min_lr=0.2, warmup_steps=3)
    rates = [learning_rate(i, s, 7) for i in range(7)]
    half = [0.2 + 0.4 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, *half], abs=1e-12)
    constant = TrainSettings(1, 1, lr=0.1, min_lr=0.1)
    assert {learning_rate(i, constant, 7) for i in range(7)} == {0.1}


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(epochs=0), "epochs=0 .* 1 or more"),
        (dict(epochs=True), "epochs=True"),
        (dict(batch_size=2.0), "whole number"),
        (dict(weight_decay=-1), "weight_decay=-1"),
        (dict(weight_decay=math.nan), "weight_decay=nan"),
        (dict(optimizer="sgd"), "'adam', 'adamw'"),
        (dict(precision=False), "quotes"),
        (dict(lr=math.inf), "lr=inf"),
        (dict(lr=1e-3, min_lr=1e-2), "min_lr=0.01 lies above lr=0.001"),
        (dict(clip_norm=0), "null"),
        (dict(save_every=0), "save_every=0"),
    ],
)
def test_wrong_settings_are_refused(values, words):
    with pytest.raises(ValueError, match=words) as error:
        TrainSettings(**{"epochs": 1, "batch_size": 1} | values)
    assert "\n" not in str(error.value)


# --- The loop ------------------------------------------------------------------------------------------------------------


def test_equal_runs_write_equal_bytes_whatever_reads(tmp_path):
    for out, workers in (("a", 0), ("b", 0), ("c", 2)):
        settings = dataclasses.replace(SETTINGS, workers=workers)
        torch.rand(3)  # the caller's generators do not matter
        history = fit(
            new_model(), masked_loss, Pairs(), settings, tmp_path / out, tmp_path / f"resume-{out}", progress=False
        )
    for file in ("model.pt", "log.csv"):
        a, b, c = ((tmp_path / out / file).read_bytes() for out in "abc")
        assert a == b == c
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["log.csv", "model.pt"]
    assert [p.name for p in (tmp_path / "resume-a").iterdir()] == ["lock"]
    assert history.steps == 30 and history.resumed_at == 0 and history.seconds > 0 and history.items_per_second > 0
    assert [row["step"] for row in history.rows] == [1, 4, 8, 12, 16, 20, 24, 28, 30]


def test_another_seed_is_another_run(tmp_path):
    for seed in (0, 1):
        fit(new_model(), masked_loss, Pairs(), SETTINGS, tmp_path / str(seed), seed=seed, progress=False)
    assert (tmp_path / "0/model.pt").read_bytes() != (tmp_path / "1/model.pt").read_bytes()


def test_log_is_the_mean_since_the_last_row(tmp_path):
    losses = []

    def spy(model, batch, step):
        value = masked_loss(model, batch, step)
        losses.append(value.item())
        return value

    history = fit(new_model(), spy, Pairs(), SETTINGS, tmp_path, progress=False)
    begin = 0
    for row in history.rows:
        end = int(row["step"])
        assert row["loss"] == pytest.approx(sum(losses[begin:end]) / (end - begin), abs=1e-6)
        assert row["lr"] == learning_rate(end - 1, SETTINGS, 30)
        begin = end


def test_probes_see_the_model_in_eval_mode_without_gradient(tmp_path):
    seen = []

    def probe(model, batch):
        seen.append((model.training, torch.is_grad_enabled(), len(batch[0])))
        return model[0].weight.abs().max()

    quiet = fit(new_model(), masked_loss, Pairs(), SETTINGS, tmp_path / "a", progress=False)
    history = fit(
        new_model(), masked_loss, Pairs(), SETTINGS, tmp_path / "b", probes={"largest": probe}, progress=False
    )
    assert seen == [(False, False, 8)] * len(history.rows)
    assert history.rows[-1]["largest"] == pytest.approx(weights(tmp_path / "b/model.pt")["0.weight"].abs().max().item())
    assert (tmp_path / "a/model.pt").read_bytes() == (tmp_path / "b/model.pt").read_bytes()
    assert [{k: row[k] for k in quiet.rows[0]} for row in history.rows] == quiet.rows
    assert (tmp_path / "b/log.csv").read_text().splitlines()[0] == "step,epoch,lr,loss,grad_norm,largest"


def test_gradient_is_clipped(tmp_path):
    norms = {}
    for clip in (0.01, None):
        settings = dataclasses.replace(SETTINGS, clip_norm=clip, epochs=2)
        model = new_model()
        history = fit(model, masked_loss, Pairs(), settings, tmp_path / str(clip), progress=False)
        norms[clip] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        assert history.rows[0]["grad_norm"] > 0.02  # before clipping
    assert norms[0.01] == pytest.approx(0.01, rel=1e-3) and norms[None] > 0.02


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_keeps_float32_weights(tmp_path, precision):
    dtypes = set()

    def spy(model, batch, step):
        dtypes.add(model(batch[0]).dtype)
        return masked_loss(model, batch, step)

    model, settings = new_model(0), dataclasses.replace(SETTINGS, precision=precision, epochs=20)
    history = fit(model, spy, Pairs(), settings, tmp_path, progress=False)
    assert dtypes == {{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    assert history.rows[-1]["loss"] < 0.5 * history.rows[0]["loss"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_gradient_that_overflows_in_fp16_skips_the_step(tmp_path):
    def loss(model, batch, step):
        return masked_loss(model, batch, step) * (1e36 if step.index == 3 else 1)

    settings = dataclasses.replace(SETTINGS, precision="fp16", epochs=2, log_every=1)
    history = fit(new_model(), loss, Pairs(), settings, tmp_path, progress=False)
    assert math.isnan(history.rows[3]["grad_norm"]) and math.isfinite(history.rows[4]["grad_norm"])
    assert all(p.isfinite().all() for p in weights(tmp_path / "model.pt").values())


def test_tensorboard(tmp_path, monkeypatch):
    settings = dataclasses.replace(SETTINGS, tensorboard=True)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with pytest.raises(ImportError, match=r"tensorboard=true needs .*afno\[tensorboard\].*false"):
            fit(new_model(), masked_loss, Pairs(), settings, tmp_path / "out", tmp_path / "resume", progress=False)
    pytest.importorskip("tensorboard")
    fit(new_model(), masked_loss, Pairs(), settings, tmp_path / "out", tmp_path / "resume", progress=False)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["log.csv", "model.pt"]
    assert list((tmp_path / "resume/tensorboard").glob("events*"))


def test_progress_bar_goes_to_stderr_and_leaves_nothing(tmp_path, capsys):
    fit(new_model(), masked_loss, Pairs(), SETTINGS, tmp_path, name="afno")
    out, err = capsys.readouterr()
    assert out == "" and "afno" in err and "/30" in err and err.rstrip(" ").endswith("\r")


# --- Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_ends_the_run_before_the_weights_move(tmp_path, where):
    before = {}

    class Root(torch.autograd.Function):
        "One forward, not a number backward."

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * math.nan

    def loss(model, batch, step):
        value = masked_loss(model, batch, step)
        if step.index == 9:
            before.update({k: v.clone() for k, v in model.state_dict().items()})
            return value * math.inf if where == "loss" else Root.apply(value)
        return value

    with pytest.raises(FloatingPointError, match=r"at step 10 of 30 .*nan_step_10\.pt") as error:
        fit(new_model(), loss, Pairs(), SETTINGS, tmp_path / "out", tmp_path / "resume", progress=False)
    assert "\n" not in str(error.value)
    saved = weights(tmp_path / "resume/nan_step_10.pt")
    assert saved["step"]["index"] == 9 and saved["broken"][0] == "0.weight" and len(saved["batch"][0]) == 8
    assert all(torch.equal(saved["model"][k], v) for k, v in before.items())
    assert weights(tmp_path / "resume/state.pt")["done"] == 7
    assert not (tmp_path / "out/model.pt").exists()


def test_another_process_is_refused_by_name(tmp_path):
    code = "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); f.write(str(os.getpid())); f.flush(); print(flush=True); time.sleep(30)"
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path / "lock"], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        with pytest.raises(RuntimeError, match=f"process {other.pid} is training this run"):
            with run_lock(tmp_path, patience=0):
                pass
        os.kill(other.pid, signal.SIGKILL)
        with run_lock(tmp_path, patience=5):  # frees itself
            assert (tmp_path / "lock").read_text() == str(os.getpid())
    finally:
        other.kill()
        other.wait()


def test_source_fingerprint_follows_the_sources(tmp_path, monkeypatch):
    import afno

    for name in ("a.py", "sub/b.py", "_modidx.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(afno, "__file__", str(tmp_path / "__init__.py"))
    first = source_fingerprint()
    (tmp_path / "_modidx.py").write_text("x = 2")
    assert source_fingerprint() == first
    (tmp_path / "sub/b.py").write_text("x = 2")
    assert source_fingerprint() != first


class Stop(Exception):
    pass


def stopped_at(step):
    def loss(model, batch, s):
        if s.index == step:
            raise Stop
        return masked_loss(model, batch, s)

    return loss


@pytest.mark.parametrize(
    "changes, seed, data, model, words",
    [
        (dict(lr=0.02), 0, Pairs(), new_model(), "settings.lr was 0.01, is 0.02"),
        (dict(log_every=3), 0, Pairs(), new_model(), "settings.log_every was 4, is 3"),
        ({}, 1, Pairs(), new_model(), "seed was 0, is 1"),
        ({}, 0, Pairs(41), new_model(), "items was 40, is 41"),
        ({}, 0, Pairs(), new_model().append(nn.Linear(4, 4)), r"\(weight shapes\)"),
        (dict(workers=1, save_every=5, tensorboard=False), 0, Pairs(), new_model(), None),
    ],
)
def test_only_the_same_run_is_continued(tmp_path, capsys, changes, seed, data, model, words):
    with pytest.raises(Stop):
        fit(new_model(), stopped_at(9), Pairs(), SETTINGS, tmp_path / "out", tmp_path / "resume", progress=False)
    assert weights(tmp_path / "resume/state.pt")["done"] == 7
    settings = dataclasses.replace(SETTINGS, **changes)
    history = fit(model, masked_loss, data, settings, tmp_path / "out", tmp_path / "resume", seed=seed, progress=False)
    said = capsys.readouterr().err
    if words is None:
        assert history.resumed_at == 7 and said == ""
    else:
        assert history.resumed_at == 0 and re.search(words, said) and said.count("\n") == 1
        assert weights(tmp_path / "resume/state.pt.stale")["done"] == 7


def test_without_a_resume_folder_signals_act_as_usual(tmp_path):
    def loss(model, batch, step):
        if step.index == 3:
            signal.raise_signal(signal.SIGINT)
        return masked_loss(model, batch, step)

    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt) as error:
            fit(new_model(), loss, Pairs(), SETTINGS, tmp_path / "a", progress=False)
        assert not isinstance(error.value, Interrupted)
        with pytest.raises(Interrupted, match="interrupted at step 4 of 30; run the same command again to resume"):
            fit(new_model(), loss, Pairs(), SETTINGS, tmp_path / "b", tmp_path / "resume", progress=False)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    finally:
        signal.signal(signal.SIGINT, outside)


# --- Two processes -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
import dataclasses, os, signal
from test_train import Pairs, SETTINGS, error, fit, masked_loss, new_model
stop, precision = int(sys.argv[3]), sys.argv[4]
def loss(model, batch, step):
    if step.index == stop and step.positions[0] == 0: os.kill(os.getpid(), signal.SIGTERM)
    return masked_loss(model, batch, step)
settings = dataclasses.replace(SETTINGS, precision=precision)
h = fit(new_model(0), loss, Pairs(), settings, sys.argv[2] + "/out", sys.argv[2] + "/resume", probes={"error": error}, progress=False)
os.write(1, f"process {h.resumed_at}\\n".encode())  # one call, so that lines of two processes do not mix
"""


def error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def launch(tmp_path, processes, stop=-1, precision="no", cpu="1"):
    "Run SCRIPT in several processes. (`accelerate launch --cpu --num_processes 2` would start one only.)"
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    command += [tmp_path / "run.py", Path(__file__).parent, tmp_path, stop, precision]
    environment = os.environ | {"ACCELERATE_USE_CPU": cpu, "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300)


def check_processes(tmp_path, processes, rel=1e-3, **how):
    "Stop a run by a signal to one of its processes, continue it, and compare with one process on the CPU."
    one = fit(new_model(0), masked_loss, Pairs(), SETTINGS, tmp_path / "one", probes={"error": error}, progress=False)
    first = launch(tmp_path, processes, stop=12, **how)
    assert first.returncode != 0 and "interrupted at step 13 of 30" in first.stderr, first.stderr
    assert torch.load(tmp_path / "resume/state.pt", weights_only=True, map_location="cpu")["done"] == 13
    second = launch(tmp_path, processes, **how)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("process 13") == processes, second.stdout
    a, b = weights(tmp_path / "one/model.pt"), weights(tmp_path / "out/model.pt")
    assert a.keys() == b.keys()
    rows = list(csv.DictReader((tmp_path / "out/log.csv").open()))
    if (
        how.get("precision") == "fp16"
    ):  # its scale may be too large at first: a skipped step, which one process may not have
        assert float(rows[-1]["loss"]) == pytest.approx(one.rows[-1]["loss"], rel=rel)
        return
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=rel / 50, rtol=rel / 10)
    for line, row in zip(rows, one.rows, strict=True):
        assert [float(v) for v in line.values()] == pytest.approx(list(row.values()), rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("precision, rel", [("no", 1e-3), ("fp16", 0.1)])
def test_two_processes_train_the_weights_of_one(tmp_path, precision, rel):
    check_processes(tmp_path, 2, rel, precision=precision)


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("precision, rel", [("no", 1e-3), ("bf16", 0.2), ("fp16", 0.1)])
@pytest.mark.parametrize("processes", [1, 2])
def test_gpus_train_the_weights_of_a_cpu(tmp_path, processes, precision, rel):
    if processes > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    check_processes(tmp_path, processes, rel, precision=precision, cpu="0")
