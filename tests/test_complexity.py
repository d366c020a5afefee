"The counter against other people's numbers and against itself, and the stopwatch."

import json
import math

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from afno.complexity import FFT_OPERATIONS, count, operations, parts_of
from afno.models import SIZES, vit
from afno.speed import environment, evaluating, latency

MIXERS = list(SIZES["b4"])
FEW = {"attention": {"num_heads": 4}, "longshort": {"num_heads": 4, "rank": 2}, "gfn": {}, "afno": {"num_blocks": 4}}


def small(mixer, **settings):
    "A model of two blocks for 32x32 pictures."
    return vit("b4", mixer, **{"img_size": 32, "dim": 24, "depth": 2, "mixer_settings": FEW[mixer], **settings})


@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny"])
def test_agrees_with_what_torchvision_prints(name):
    meta = torchvision.models.get_model_weights(name).DEFAULT.meta
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    found = count(model, (1, 3, 224, 224))
    assert found.total_parameters == meta["num_params"]
    assert found.total_macs / 1e9 == pytest.approx(meta["_ops"], abs=5e-4)


def test_pencil_case():
    model = nn.Sequential(nn.Conv2d(3, 5, 2), nn.Flatten(2), nn.Linear(9, 4))
    assert count(model, (3, 4, 4)).macs == {"other": 9 * 5 * 3 * 2 * 2 + 5 * 9 * 4}
    assert count(model, (3, 4, 4)).parameters == {"other": 5 * 12 + 5 + 9 * 4 + 4}


@pytest.mark.parametrize("mixer", MIXERS)
def test_batch_and_device_do_not_matter(mixer):
    model = small(mixer)
    one, many = count(model, (3, 20, 36)), count(model, (5, 3, 20, 36))
    assert many.macs == {part: 5 * n for part, n in one.macs.items()}
    with torch.device("meta"):
        assert count(small(mixer), (3, 20, 36)) == one
    assert count(model.bfloat16(), (3, 20, 36)) == one


@pytest.mark.parametrize("size", [(32, 32), (20, 36), (4, 44), (36, 28)])
@pytest.mark.parametrize("mixer", ["attention", "afno", "longshort"])
def test_closed_forms_are_what_runs(mixer, size):
    model = small(mixer)
    said, ran = count(model, (3, *size)), operations(model, (3, *size))
    assert said.mixer_macs - said.macs.get("mixers.transforms", 0) == ran.get("mixers.products", 0)
    assert said.macs.get("mixers.transforms", 0) == pytest.approx(ran.get("mixers.fft", 0), abs=2 * 2 * 24)


@pytest.mark.parametrize("modes", [0.25, 0.6, (5, 3), (7, 4)])
def test_dropped_modes_are_not_counted(modes):
    model = small("afno", mixer_settings={"num_blocks": 4, "modes": modes, "skip": "identity"})
    said, ran = count(model, (3, 32, 32)), operations(model, (3, 32, 32))
    assert said.macs["mixers.block_mlp"] == ran["mixers.products"]
    assert said.macs["mixers.transforms"] == pytest.approx(ran["mixers.fft"], abs=2 * 2 * 24)
    everything = count(small("afno"), (3, 32, 32))
    assert said.macs["mixers.block_mlp"] < everything.macs["mixers.block_mlp"]
    assert said.macs["mixers.transforms"] < everything.macs["mixers.transforms"]


@pytest.mark.parametrize("mixer", MIXERS)
def test_counting_leaves_the_model_alone(mixer):
    model = small(mixer).train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    routes = [getattr(m, "route", None) for m in model.modules()]
    count(model, (3, 32, 32))
    assert [m.training for m in model.modules()] == modes
    assert [getattr(m, "route", None) for m in model.modules()] == routes
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_failing_model_is_given_back_too():
    model = small("afno").train()
    with pytest.raises(ValueError, match="crop or pad"):
        count(model, (3, 30, 32))
    assert model.training and model.blocks[0].mixer.route == "auto"
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_paper_leaves_out_what_it_says():
    true, paper = (count(small("attention"), (3, 32, 32), c) for c in ("true", "paper"))
    assert true.total_macs - paper.total_macs == 2 * 64**2 * 24
    true, paper = (count(small("afno", mixer_settings=FEW["afno"]), (3, 32, 32), c) for c in ("true", "paper"))
    assert set(true.macs) - set(paper.macs) == {"mixers.transforms", "mixers.skip"}
    assert count(small("gfn"), (3, 32, 32), "paper").mixer_macs == 0
    assert count(small("longshort"), (3, 32, 32), "paper").macs == count(small("longshort"), (3, 32, 32)).macs


def test_a_mixer_alone_is_a_part():
    mixer = small("attention").blocks[0].mixer
    assert parts_of(mixer) == {"": "mixers"}
    found = count(mixer, (1, 8, 8, 24))
    assert (
        set(found.parameters) == {"mixers"} and found.total_macs == found.mixer_macs == 4 * 64 * 24**2 + 2 * 64**2 * 24
    )


@pytest.mark.parametrize("n", [8, 12, 7])
def test_one_dimensional_transforms(n):
    with FlopCounterMode(display=False, custom_mapping=FFT_OPERATIONS) as counter:
        torch.fft.irfft(torch.fft.rfft(torch.zeros(3, n, device="meta")), n=n)
        torch.fft.fft(torch.zeros(3, n, dtype=torch.complex64, device="meta"))
    assert counter.get_total_flops() == pytest.approx(3 * (2 * 2.5 + 5) * n * math.log2(n))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(convention="flops"), "convention='flops' is unknown; allowed are true, paper, table4"),
        (dict(input_shape=(32, 32)), "allowed are (3, h, w) and (B, 3, h, w)"),
    ],
)
def test_refuses_in_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        count(**{"model": small("gfn"), "input_shape": (3, 32, 32), **settings})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_latency_is_the_median_of_its_runs(monkeypatch):
    ticks = iter([0, 9, 0, 1, 0, 2, 0, 3, 0, 4, 0, 100])  # one warm-up of 9 s, then runs of 1, 2, 3, 4 and 100 s
    monkeypatch.setattr("afno.speed.time.perf_counter", lambda: next(ticks))
    found = latency(torch.relu, torch.zeros(1), repeats=5, warmup=1)
    assert (found.low, found.median, found.high, found.spread, found.n) == (2, 3, 4, 2, 5)


def test_one_run_has_no_spread(monkeypatch):
    ticks = iter([0, 7])
    monkeypatch.setattr("afno.speed.time.perf_counter", lambda: next(ticks))
    found = latency(torch.relu, torch.zeros(1), repeats=1, warmup=0)
    assert (found.low, found.median, found.high) == (7, 7, 7)


def test_evaluating_gives_back_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with pytest.raises(KeyError), evaluating(model):
        assert not model[0].training
        raise KeyError
    assert model.training and model[0].training and not model[1].training


def test_records_are_plain():
    record = {"latency": latency(small("gfn"), torch.zeros(1, 3, 32, 32), repeats=2).record(), **environment()}
    back = json.loads(json.dumps(record))
    assert back["latency"]["device"] == "cpu" and back["torch"] == str(torch.__version__)
