"What the committed smoke run must show."

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "results/smoke/evaluate/inpaint.json").read_text())


@pytest.mark.parametrize("mixer", ["attention", "longshort", "gfn", "afno"])
def test_each_mixer_beats_the_mean_by_one_decibel(mixer):
    for seed in RECORD["metrics"][mixer].values():
        assert seed["psnr_dB"] >= RECORD["fillers"]["mean"]["psnr_dB"] + 1


def test_report_shows_every_row_of_table_2():
    page = (ROOT / "reports/smoke/report.md").read_text()
    for row in ("Self-Attention", "LS", "GFN", "AFNO (ours)", "*mean*", "*biharmonic*"):
        assert f"| {row}" in page
