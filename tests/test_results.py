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
        assert run["best"] >= run["last"] > 2 * run["majority"] and "scratch" in seed[kind]


@pytest.mark.parametrize("kind", FEWSHOT_SETS)
def test_mixers_together_beat_the_largest_class_by_ten_points(kind):
    "One run alone moves by more than a point when only the order of sums changes; four together do not."
    runs = [seed[kind]["pretrained"] for m in MIXER_NAMES for seed in RECORDS["fewshot"]["metrics"][m].values()]
    assert sum(run["last"] - run["majority"] for run in runs) / len(runs) > 0.1


@pytest.mark.parametrize("system", [name for name in SYSTEM_NAMES if name != "attention"])
def test_streets_beat_the_largest_class(system):
    for seed in RECORDS["segment"]["metrics"][system].values():
        assert seed["miou"] > 0.1 and seed["classes"] >= 15


@pytest.mark.parametrize("mixer", MIXER_NAMES)
def test_classes_beat_chance(mixer):
    record = RECORDS["classify"]
    for seed in record["metrics"][mixer].values():
        assert seed["top1"] > 200 / record["classes"] and seed["top5"] > seed["top1"]


REPORTS = ROOT / "reports/smoke"
PAGE = (REPORTS / "report.md").read_text()


def rows_beside_the_paper(title: str) -> list[dict[str, str]]:
    "Read the first table below a heading."
    lines = re.search(rf"^## {title}.*?\n(\|.*?)\n\n", PAGE, re.M | re.S)[1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


@pytest.mark.parametrize(
    ("title", "systems", "measures"),
    [
        ("Table 2", MIXER_NAMES, 2),
        ("Table 3", MIXER_NAMES, 3),
        ("Table 4", SYSTEM_NAMES, 1),
        ("Table 5", MIXER_NAMES, 2),
    ],
)
def test_every_row_of_a_table_stands_beside_the_paper(title, systems, measures):
    rows = rows_beside_the_paper(title)
    assert sorted(row["system"] for row in rows) == sorted([name for name, _ in systems.values()] * measures)
    for row in rows:
        untrained = (title, row["system"]) == ("Table 4", "SA")  # the paper could not train it either
        unprinted = untrained or (title, row["system"]) == ("Table 5", "Self-Attention")
        assert (row["ours (mean ± sd, n)"] == "—") == untrained and (row["paper"] == "—") == unprinted
        assert (row["difference"] == "—") == unprinted and row["tier"] == "smoke" and row["hardware"] not in ("", "—")


def test_ablations_stand_beside_the_paper():
    assert [row["paper"] for row in rows_beside_the_paper("Figure 3")] == ["0.01", "0.01", "8"]
    rows = rows_beside_the_paper("Table 6")
    assert len(rows) == 14 and {row["paper"] for row in rows} >= {"24.8", "25.1", "23.58", "25.69", "39.27", "49.49"}
    assert "—" not in {row["ours (mean ± sd, n)"] for row in rows}


def test_every_point_of_the_scale_figure_was_trained():
    found = json.loads((ROOT / "results/smoke/scale/scale.json").read_text())["metrics"]
    named = {f"segformer-b{i}/{m}" for i in range(4) for m in ("afno", "gfn", "efficient_attention")}
    assert named | {"swin_t", "swin_s", "swin_b", "resnet50", "resnet101", "mobilenet_v2"} == set(found)


def test_every_stage_ran_and_every_figure_is_there():
    assert "Every stage ran." in PAGE
    figures = re.findall(r"\]\(([^)]*\.png)\)", PAGE)
    assert len(figures) >= 13 and len(set(figures)) == len(figures)
    assert all((REPORTS / name).exists() for name in figures)
    page = (REPORTS / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(figures) and not re.findall(r'src="(?!data:)', page)


def test_every_link_of_the_report_leads_somewhere():
    assert all((REPORTS / name).exists() for name in re.findall(r"\]\(([^)]*)\)", PAGE))


def test_metrics_are_the_numbers_of_the_report():
    numbers = json.loads((ROOT / "results/smoke/report/tables.json").read_text())
    for row in rows_beside_the_paper("Table 2"):
        mixer = next(m for m, (name, _) in MIXER_NAMES.items() if name == row["system"])
        ours = numbers["table2"][mixer]["ssim" if row["measure"] == "SSIM" else "psnr_dB"]
        assert float(row["ours (mean ± sd, n)"].split()[0]) == pytest.approx(ours, abs=0.006)
