"The bench: what does not change stands in the record, what was measured beside it."

import dataclasses
import json

import pytest
import torch

import afno.bench
from afno.bench import (
    SpeedSettings,
    bench,
    compiled,
    count_layer,
    kept_cases,
    mixer_cases,
    model_cases,
    shape_cases,
    time_layer,
    time_model,
)
from afno.bench_tables import exponent, exponents, growth, plot_speed, ratios, roofline, save_speed, speed_markdown
from afno.core import load_params, root
from afno.mixers import build_mixer
from afno.speed import attempt, latency, peak_memory, time_module, time_step

FEW = SpeedSettings(
    width=16,
    heads=4,
    grids=[4, 6, 8],
    tokens=64,
    fit=[16, 64],
    limit_macs=1e8,
    shapes=[[2, 4, 6, 12, 4, 3]],
    kept_side=8,
    vit_depth=1,
    vit_size=8,
    vit_batch=2,
    segformer="b0",
    segformer_size=32,
    segformer_batch=1,
    compile=None,
    repeats=2,
    warmup=0,
    seconds=1.0,
    dtype="float32",
)
NO_MODELS = dataclasses.replace(FEW, limit_macs=1e6)
CPU = torch.device("cpu")


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nof the GPU")


@pytest.fixture(scope="module")
def measured():
    return bench(FEW, "cpu")


@pytest.mark.parametrize("tier", ["smoke", "small", "paper"])
def test_sections_fit(tier):
    "Every case of every tier can be built; only attention over a million tokens may be left out."
    settings = load_params("speed", SpeedSettings, root() / "params" / f"{tier}.yaml")
    for table in (mixer_cases, shape_cases, kept_cases):
        for case in table(settings).values():
            assert count_layer(case, settings.limit_macs)["left_out"] is None or case["mixer"] == "attention"
    assert any(rows != cols for _, rows, cols, *_ in settings.shapes) and len(model_cases(settings)) == 9
    assert sum(settings.fit[0] <= side**2 <= settings.fit[1] for side in settings.grids) >= 3


def test_named_shapes_are_those_of_known_models():
    for tier in ("small", "paper"):
        shapes = load_params("speed", SpeedSettings, root() / "params" / f"{tier}.yaml").shapes
        assert [shape[:5] for shape in shapes] == [
            [32, 56, 56, 768, 8],
            [64, 56, 56, 384, 16],
            [4, 90, 180, 768, 8],
            [2, 256, 256, 208, 1],
            [32, 56, 56, 750, 1],
        ]


def test_times_are_ordered_and_gradients_cleared():
    layer = torch.nn.Linear(3, 2)
    found = time_module(layer, torch.ones(4, 3), repeats=4, warmup=0)
    for x in found.values():
        assert 0 < x["low"] <= x["median"] <= x["high"] and x["n"] == 4
        assert x["per_second"] == pytest.approx(4 / x["median"])
    assert layer.weight.grad is None and layer.training
    assert found["forward"]["peak_bytes"] == 4 * 2 * 4  # the output


def test_peak_memory_counts_what_lives_at_once():
    x = torch.zeros(1000)
    assert peak_memory(x.neg, CPU) == 4000
    assert peak_memory(lambda: [x.neg() for _ in range(5)], CPU) == 20000
    assert peak_memory(lambda: x.add_(x), CPU) == 0


def test_a_limit_in_seconds_leaves_three_runs():
    calls = []
    assert latency(calls.append, torch.zeros(1), repeats=50, warmup=9, seconds=0.0).n == 3 and len(calls) == 5


def test_a_case_that_does_not_fit_is_recorded_and_the_others_run(measured, monkeypatch):
    forward = afno.bench.TextbookAFNO.forward

    def small_only(self, x):
        return forward(self, x) if x.shape[1] < 8 else full()

    monkeypatch.setattr(afno.bench.TextbookAFNO, "forward", small_only)
    record, run = bench(NO_MODELS, "cpu")
    assert run["mixers"]["textbook/8"]["forward"] == {"error": "out of memory"}
    assert "median" in run["mixers"]["textbook/6"]["forward"] and "median" in run["mixers"]["afno/8"]["forward"]
    assert growth(record, run, "textbook", "forward", "median")[-1][0] == 36
    assert "| out of memory |" in speed_markdown(record, run) and plot_speed(record, run)


def test_any_error_keeps_its_first_line_without_paths():
    def broken():
        raise ValueError("no kernel in /some/where/layer.py\nmore")

    assert attempt(broken, CPU) == {"error": "ValueError: no kernel in layer.py"}
    assert attempt(full, CPU) == {"error": "out of memory"}


def test_gradients_alone_may_fail():
    class Once(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if torch.is_inference_mode_enabled() else full()

    found = time_module(Once(3, 3), torch.ones(2, 3), repeats=2)
    assert "median" in found["forward"] and found["forward+backward"] == {"error": "out of memory"}


def test_cases_above_the_limit_are_left_out_with_the_reason():
    record, run = bench(dataclasses.replace(FEW, limit_macs=1.0), "cpu")
    assert record["mixers"][0]["macs"] == 4 * 16 * 16**2 + 2 * 16**2 * 16 and len(record["mixers"]) == 21
    assert not any(run[part] for part in ("mixers", "shapes", "kept", "models"))
    assert "more than limit_macs=1.0e+00" in record["mixers"][0]["left_out"]
    assert "left out" in speed_markdown(record, run)


def test_kept_coefficients_are_a_quarter_and_a_sixteenth():
    cases = kept_cases(dataclasses.replace(FEW, kept_side=256))
    shares = [
        len(m.kept((256, 256)).rows) * m.kept((256, 256)).cols
        for m in (build_mixer("afno", 8, **c["own"]) for c in cases.values())
    ]
    assert [round(n / shares[0], 2) for n in shares] == [1, 0.25, 0.06]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_case_is_measured(dtype):
    "On a GPU numbers are bfloat16 and models run under autocast; the same branches run here."
    settings = dataclasses.replace(FEW, dtype=dtype)
    for case in [*shape_cases(settings).values(), kept_cases(settings)["half of each axis"]]:
        assert all("median" in x for x in time_layer(case, settings, "cpu").values())
    for key in ("b4/afno 768/8", "segformer-b0/afno"):
        assert all("median" in x for x in time_model(model_cases(settings)[key], settings, "cpu").values())


def test_a_step_trains_in_half_precision_and_counts_all_memory():
    layer = torch.nn.Linear(32, 32)
    before = layer.weight.detach().clone()
    found = time_step(layer, lambda y: y.float().square().mean(), torch.ones(8, 32), torch.bfloat16, repeats=2)
    assert not torch.equal(before, layer.weight) and layer.weight.grad is None
    assert found["peak_bytes"] >= 4 * 4 * (32 * 32 + 32)  # weights, gradients, two averages


def test_a_model_that_does_not_compile_is_recorded(monkeypatch):
    def refuse(module, **_):
        raise RuntimeError("no graph\nat line 7")

    monkeypatch.setattr(torch.nn.Module, "compile", refuse)
    found = time_model(model_cases(FEW)["b4/gfn"], dataclasses.replace(FEW, compile="blocks"), "cpu")
    assert found["compiled step"] == {"error": "RuntimeError: no graph"} and "median" in found["step"]


@pytest.mark.parametrize(("how", "parts"), [("blocks", ["Block", "Block"]), ("model", ["VisionTransformer"])])
def test_what_is_compiled(how, parts, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: seen.append(type(self).__name__))
    compiled(afno.bench.vit("b4", "gfn", 8, depth=2, dim=16), how)
    assert seen == parts


@pytest.mark.slow
def test_blocks_compile_and_train():
    found = time_model(model_cases(FEW)["b4/afno 768/8"], dataclasses.replace(FEW, compile="blocks"), "cpu")
    assert "median" in found["compiled step"]


def test_an_interrupted_run_continues(tmp_path, monkeypatch, capsys):
    done, time_one = [], afno.bench.time_layer

    def stop_at_nine(case, *rest):
        if len(done) == 9:
            raise KeyboardInterrupt
        done.append(case["mixer"])
        return time_one(case, *rest)

    monkeypatch.setattr(afno.bench, "time_layer", stop_at_nine)
    with pytest.raises(KeyboardInterrupt):
        bench(NO_MODELS, "cpu", tmp_path / "keep")
    kept = {path: path.read_bytes() for path in (tmp_path / "keep").rglob("*.json")}
    assert len(kept) == 10  # and the ceilings
    monkeypatch.setattr(afno.bench, "time_layer", lambda *given: done.append(given[0]["mixer"]) or time_one(*given))
    record, run = bench(NO_MODELS, "cpu", tmp_path / "keep")
    timed = sum(not case["left_out"] for part in ("mixers", "shapes", "kept") for case in record[part])
    assert len(done) == timed and all(path.read_bytes() == data for path, data in kept.items())
    other = dataclasses.replace(NO_MODELS, repeats=3)
    bench(other, "cpu", tmp_path / "keep")
    assert len(done) == 2 * timed  # other settings, other times
    assert "case" in capsys.readouterr().err
    save_speed(record, run, tmp_path / "out", keep=tmp_path / "keep", tier="none")
    assert not (tmp_path / "keep").exists()


def test_exponents_and_ratios():
    rows = [(n, 2.0 * n**1.5, 0.0, 0.0) for n in (16, 64, 256)]
    assert exponent(rows, 16, 256) == pytest.approx((1.5, 0), abs=1e-6) and exponent(rows, 17, 256) is None
    cases = [{"shape": "s", "mixer": m, "key": f"{m}/s"} for m in ("afno", "textbook", "attention")]
    times = {
        "afno/s": {"forward": {"median": 2.0}, "copy": {"median": 1.0}},
        "textbook/s": {"forward": {"median": 3.0}},
    }
    found = ratios({"shapes": cases}, {"shapes": times})["s"]
    assert found["textbook / AFNO, forward, time"] == 1.5 and found["AFNO / copy, forward"] == 2
    assert found["attention / AFNO, forward, time"] is None


def test_nothing_is_below_the_floor_of_memory(measured):
    record, run = measured
    for way in ("forward", "forward+backward"):
        for (_, peak, *_), (_, least) in zip(
            growth(record, run, "afno", way, "peak_bytes"), roofline(record, run, way, "peak_bytes")
        ):
            assert peak >= least
    assert all(x["with backward, memory"][0] < 1.3 for x in exponents(record, run).values())


def test_record_is_the_same_bytes_and_holds_no_time(tmp_path, measured):
    record, run = measured
    save_speed(record, run, tmp_path / "a", plot_speed(record, run), tier="none")
    save_speed(*bench(FEW, "cpu"), tmp_path / "b", tier="none")
    first, second = ((tmp_path / name / "speed.json").read_bytes() for name in ("a", "b"))
    assert first == second and b"median" not in first
    side = json.loads((tmp_path / "a" / "speed.run.json").read_text())
    assert side["mixers"]["afno/4"]["forward"]["n"] == 2 and side["environment"]["timed_on"] == "cpu"
    assert {"triton", "driver", "gpu", "torch"} <= set(side["environment"]) and side["ceilings"]["flops_per_second"] > 0
    assert set(side["exponents"]) == {c["mixer"] for c in record["mixers"]} and "2x4x6x12/4" in side["ratios"]
    text = speed_markdown(record, run)
    assert "b4/afno 750/1" in text and "textbook / AFNO" in text and 'error"' not in json.dumps(run)
    assert "—" in speed_markdown(record, {})
