"The audit of the paper's complexity: what is reproduced, what is not, and that three routes meet."

import json
from functools import cache

import pytest

from afno.audit import MODELS, audit, audit_markdown, cell, macs, model_formula, on_meta, save_audit
from afno.complexity import CONVENTIONS

FORMULAS = [(f"b4 {x}", 224) for x in ("attention", "longshort", "gfn", "afno")] + [
    ("s4 gfn", 224),
    ("b3 afno, 25 %", 256),
]


@cache
def record():
    return audit()


def cells(table, column):
    return {x["row"]: x for x in record()["cells"] if x["table"] == table and x["column"] == column}


@pytest.mark.parametrize("name, size", FORMULAS)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_closed_forms_are_what_is_counted(name, size, convention):
    formula = model_formula(on_meta(name), size, convention)
    assert [x / 1e9 for x in formula] == pytest.approx(macs(name, size, convention), rel=1e-5)


def test_table_1_parameters_are_those_of_layers():
    assert {x["status"] for x in cells("1", "params").values()} == {"reproduced"}


def test_flops_of_tables_2_and_4():
    for x in (*cells("2", "gflops").values(), *cells("4", "total_gflops").values()):
        assert x["status"] == "reproduced" and abs(x["difference_percent"]) < 0.4
    mixers = {row: x["status"] for row, x in cells("4", "mixer_gflops").items()}
    assert {row for row, status in mixers.items() if status != "reproduced"} == {
        "self_attention",
        "afno_100",
        "afno_25",
    }


def test_a_third_without_a_reason_reproduces_nothing():
    for x in cells("5", "gflops").values():
        assert x["status"] == "not reproduced" and x["tried"]["a third of paper"] == pytest.approx(
            x["paper"], rel=0.011
        )


def test_every_cell_says_what_was_tried():
    for x in record()["cells"]:
        assert x["tried"][x["convention"]] == x["ours"]
        within = abs(x["difference_percent"]) <= 1 or "digit printed" in x["note"]
        assert x["status"] != "reproduced" or within
    assert set(record()["axis"]) == {"afno", "gfn", "efficient_attention"}


def test_rows_are_compared_at_the_digit_printed():
    assert cell("2", "a", "b", 2.6, {"x": 2.64})["note"] == "to the digit printed"
    assert cell("2", "a", "b", 2.6, {"x": 2.66})["status"] == "not reproduced"


def test_record_is_the_same_bytes_and_renders(tmp_path):
    for name in ("a.json", "b.json"):
        save_audit(record(), tmp_path / name, tier="none")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert json.loads((tmp_path / "a.json").read_text())["metrics"] == record()["counts"]
    text = audit_markdown(record(), "2")
    assert text.count("\n| 2 |") == 8


def test_models_are_named_once():
    assert len(MODELS) == len(set(MODELS)) > 20
