"What a tier would cost and need, said without running it."

import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from plan import data_of, days, main, plan, runs_of  # noqa: E402

SMOKE = ROOT / "params/smoke.yaml"


def test_smoke_lists_every_run_and_needs_no_data():
    params = yaml.safe_load(SMOKE.read_text())
    rows = runs_of(params, SMOKE)
    grid = params["grid"]
    expected = [(task, mixer) for task in ("inpaint", "fewshot", "classify") for mixer in grid[task]["mixer"]]
    expected += [(f"segment.{part}", x) for x in grid["segment"]["mixer"] for part in ("pretrain", "finetune")]
    assert [(row["stage"], row["mixer"]) for row in rows] == expected
    assert data_of(params) == {}
    text = plan(SMOKE, 100.0)
    assert "data: all of it is in the repository" in text and text.count("\n") > len(rows)


def test_days_are_those_of_three_forward_passes():
    row = {"runs": 2, "seen": 1000, "macs": 10**12}
    assert days(row, 100.0) == pytest.approx(2 * 1000 * 6e12 / 1e14 / 86400)


def test_paper_says_which_data_are_missing(monkeypatch, tmp_path):
    params = yaml.safe_load((ROOT / "params/paper.yaml").read_text())
    monkeypatch.delenv("AFNO_DATA", raising=False)
    assert set(data_of(params).values()) == {"AFNO_DATA is not set"}
    monkeypatch.setenv("AFNO_DATA", str(tmp_path))
    for folder in ("imagenet/train", "cityscapes/leftImg8bit", "cityscapes/gtFine"):
        (tmp_path / folder).mkdir(parents=True)
    assert data_of(params) == {"cityscapes": "present", "datasetgan": "missing", "imagenet": "val missing"}


def test_refuses_a_rate_of_zero(capsys):
    with pytest.raises(SystemExit):
        main(["--tflops", "0"])
    assert "give more than 0" in capsys.readouterr().err
