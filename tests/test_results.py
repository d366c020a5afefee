"What the committed smoke run must show."

import json
import re
from pathlib import Path

import pytest

from afno.report import FEWSHOT_SETS, MIXER_NAMES, SYSTEM_NAMES

ROOT = Path(__file__).parents[1]
RECORDS = {
    task: json.loads((ROOT / f"results/smoke/evaluate/{task}.json").read_text())
    for task in ("inpaint", "fewshot", "segment", "classify")
}


@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_each_mixer_beats_the_mean_by_one_decibel(mixer):
    for seed in RECORDS["inpaint"]["metrics"][mixer].values():
        assert seed["psnr_dB"] >= RECORDS["inpaint"]["fillers"]["mean"]["psnr_dB"] + 1


@pytest.mark.parametrize("kind", FEWSHOT_SETS)
@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_few_pictures_beat_the_largest_class(mixer, kind):
    for seed in RECORDS["fewshot"]["metrics"][mixer].values():
        run = seed[kind]["pretrained"]
        assert run["best"] >= run["last"] > run["majority"] + 0.1 and "scratch" in seed[kind]


@pytest.mark.parametrize("system", [name for name in SYSTEM_NAMES if name != "attention"])
def test_streets_beat_the_largest_class(system):
    for seed in RECORDS["segment"]["metrics"][system].values():
        assert seed["miou"] > 0.1 and seed["classes"] >= 15


@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_classes_beat_chance(mixer):
    record = RECORDS["classify"]
    for seed in record["metrics"][mixer].values():
        assert seed["top1"] > 200 / record["classes"] and seed["top5"] > seed["top1"]


def test_report_has_every_row_and_no_dash_of_ours_but_where_the_paper_has_none():
    page = (ROOT / "reports/smoke/report.md").read_text()
    tables = dict(zip((2, 3, 4, 5), re.split(r"^## Table \d", page, flags=re.M)[1:]))
    for number, names in {2: MIXER_NAMES, 3: MIXER_NAMES, 4: SYSTEM_NAMES, 5: MIXER_NAMES}.items():
        lines = [line for line in tables[number].splitlines() if line.startswith("| ")]
        head = lines[0].split(" | ")
        for name, _ in names.values():
            rows = [line.split(" | ") for line in lines if f"| {name} |" in line]
            assert rows, (number, name)
            for row in rows[: 1 if number != 3 else None]:
                allowed = {"mIoU (%)", "paper", "difference"} if (number, name) == (4, "SA") else set()
                allowed |= (
                    {"top-1, paper", "difference", "top-5, paper", "parameters, paper", "GFLOPs, paper"}
                    if (number, name) == (5, "Self-Attention")
                    else set()
                )
                dashes = {h.strip("| ") for h, cell in zip(head, row) if cell.strip("| ") == "—"}
                assert dashes <= allowed, (number, name, dashes)
