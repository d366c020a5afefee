"""Ablations: equal parameters, what a knob lists, finished values are kept."""

from pathlib import Path

import pytest
import torch

from afno.core import load_params, root
from afno.tasks.ablate import (
    KNOBS,
    AblateSettings,
    Case,
    Share,
    build,
    cases,
    load_ablate,
    parameters,
    solve_width,
)
from afno.tasks.base import mixer_sources, once, publish
from afno.tasks.fewshot import FewshotSettings
from afno.train import TrainSettings

SMALL = AblateSettings("xs4", 1, 32, 1.0, "faces", False, [], [])


@pytest.mark.parametrize("blocks", [1, 4, 7, 16])
def test_solved_width_is_the_nearest(blocks):
    def count(d):
        return 3 * d * d + 5 * d

    width = solve_width(blocks, 10_000, count)
    assert width % blocks == 0
    assert all(abs(count(width) - 10_000) <= abs(count(d) - 10_000) for d in range(blocks, 200, blocks))


def test_solve_width_refuses():
    with pytest.raises(ValueError, match="1 or more"):
        solve_width(0, 100, lambda d: d)


@pytest.mark.parametrize("mixer", ["afno", "fno"])
def test_count_is_the_models(mixer):
    case = Case(mixer, 32, {"num_blocks": 4})
    model = build(case, SMALL, 32)
    assert parameters(case, SMALL, 32) == sum(p.numel() for p in model.parameters()) - model.pos_embed.numel()
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3, 32, 32)


def test_every_knob_lists_models():
    assert all(len(cases(knob, root() / "params/smoke.yaml")) >= 5 for knob in KNOBS)


@pytest.mark.parametrize("tier", ["smoke", "small", "paper"])
def test_every_tier_says_how_to_train(tier):
    path = root() / f"params/{tier}.yaml"
    assert load_params("ablate.pretrain", TrainSettings, path).epochs and load_ablate(path).share > 0
    assert load_params("ablate.finetune", FewshotSettings, path).scratch is False


def test_unknown_knob_is_named():
    with pytest.raises(ValueError, match="knob='width' is unknown"):
        cases("width", root() / "params/smoke.yaml")


def test_share_is_spread_evenly():
    items = {(i, 3): 10 * i for i in range(10)}
    share = Share(type("Ten", (dict,), {})(items), 0.5)
    assert [share[i, 3] for i in range(len(share))] == [0, 20, 40, 60, 80]
    with pytest.raises(ValueError, match="share=0"):
        Share(items, 0)


def test_finished_values_are_kept(tmp_path):
    folder, calls = tmp_path / "keep/8/inpaint", []

    def train():
        calls.append(1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.pt").write_bytes(b"weights")
        (folder / "log.csv").write_text("step\n1\n")

    assert once(folder, {"lr": 1}, train) and not once(folder, {"lr": 1}, train) and once(folder, {"lr": 2}, train)
    publish(tmp_path / "keep", tmp_path / "out", ["8"])
    assert sorted(p.name for p in (tmp_path / "out/8/inpaint").iterdir()) == ["log.csv", "model.pt"]
    with pytest.raises(KeyboardInterrupt):
        once(folder, {"lr": 3}, lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert once(folder, {"lr": 3}, train)


def test_editing_one_mixer_trains_no_other_again(monkeypatch):
    before = {mixer: mixer_sources(mixer) for mixer in ("afno", "attention", "fno", "gfn", "longshort")}
    edited = {"mixers/gfn.py": {"gfn"}, "mixers/afno.py": {"afno", "fno"}, "spectral.py": set(before)}
    for name, again in edited.items():
        read = Path.read_bytes
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path: read(path) + path.as_posix().endswith(f"afno/{name}") * b"#")
            assert {mixer for mixer in before if mixer_sources(mixer) != before[mixer]} == again
