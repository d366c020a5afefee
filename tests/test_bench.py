"The bench: what does not change stands in the record, what was measured beside it."

import dataclasses
import json

import pytest
import torch

from afno.bench import SpeedSettings, bench, bench_mixers, plot_speed, save_speed, speed_markdown, time_module
from afno.core import load_params, root

FEW = SpeedSettings(1, 16, 4, [4, 8], 1, 16, "b0", 32, 2, 0, 1e8, "float32", 0, False)


@pytest.mark.parametrize("tier", ["smoke", "small", "paper"])
def test_sections_fit(tier):
    settings = load_params("speed", SpeedSettings, root() / "params" / f"{tier}.yaml")
    assert settings.width % settings.heads == 0 and settings.width % 8 == 0


def test_times_are_ordered_and_gradients_cleared():
    layer = torch.nn.Linear(3, 2)
    found = time_module(layer, torch.ones(4, 3), repeats=4, warmup=0)
    for x in found.values():
        assert 0 < x["low"] <= x["median"] <= x["high"] and x["n"] == 4 and x["peak_bytes"] is None
        assert x["per_second"] == pytest.approx(4 / x["median"])
    assert layer.weight.grad is None and layer.training


def test_cases_above_the_limit_are_counted_and_not_timed():
    cases, times = bench_mixers(dataclasses.replace(FEW, limit_macs=1.0), "cpu")
    assert len(cases) == 14 and not times and not any(case["timed"] for case in cases)
    assert cases[0]["macs"] == 4 * 16 * 16**2 + 2 * 16**2 * 16


def test_record_is_the_same_bytes_and_holds_no_time(tmp_path):
    for name in ("a", "b"):
        record, run = bench(FEW, "cpu")
        save_speed(record, run, tmp_path / name, plot_speed(record, run), tier="none")
    first, second = ((tmp_path / name / "speed.json").read_bytes() for name in ("a", "b"))
    assert first == second and b"median" not in first
    side = json.loads((tmp_path / "a" / "speed.run.json").read_text())
    assert side["mixers"]["afno/4"]["forward"]["n"] == 2 and side["environment"]["timed_on"] == "cpu"
    assert speed_markdown(record, run).count("ms") == 4 and "b4/afno" in speed_markdown(record, run)
    assert "—" in speed_markdown(record, {})
