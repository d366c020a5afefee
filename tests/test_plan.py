"What a tier would cost and need, said without running it."

import sys
from pathlib import Path

import pytest
import yaml
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from plan import Training, data_of, estimated, known, main, measured, plan, rows_of  # noqa: E402

SMOKE = ROOT / "params/smoke.yaml"


def test_smoke_lists_every_training_and_needs_no_data():
    params = yaml.safe_load(SMOKE.read_text())
    rows, grid = rows_of(params, SMOKE, 100.0), params["grid"]
    found = {(row["stage"], row["label"]): row["runs"] for row in rows}
    expected = [(task, mixer) for task in ("inpaint", "fewshot", "classify") for mixer in grid[task]["mixer"]]
    expected += [(f"segment.{part}", x) for x in grid["segment"]["mixer"] for part in ("pretrain", "finetune")]
    expected += [("ablate.pretrain", knob) for knob in grid["ablate"]["knob"]]
    assert set(expected) <= set(found) and found["ablate.pretrain", "blocks"] == len(params["ablate"]["blocks"])
    assert sum(runs for (stage, _), runs in found.items() if stage == "scale.finetune") == 18
    assert data_of(params) == {}
    text = plan(SMOKE, 100.0)
    assert "data: all of it is in the repository" in text and text.count("\n") > len(rows)


def toy(**changes):
    told = {"stage": "toy", "label": "x", "seeds": 2, "seen": 1000, "batch": 4, "precision": "no", "size": (8, 8)}
    return Training(**(told | {"build": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 5))} | changes))


def test_days_are_those_of_three_forward_passes():
    assert estimated(toy(), 10**12, 100.0) == pytest.approx(2 * 1000 * 6e12 / 1e14 / 86400)


def test_measured_days_grow_with_the_pictures():
    short, long = (measured(toy(seen=seen), 20) for seen in (1000, 100_000))
    assert 0 < 10 * short < long < 1


def test_folders_with_a_known_number_of_pictures():
    assert [known({"folder": name, "train": None}) for name in ("imagenette", None)] == [9469, 1281167]
    assert known({"folder": "imagenette", "train": 7}) == 7


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
