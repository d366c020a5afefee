"""Figure 1: its points, what a point reaches is found once, and figure and table show every point."""

import io
import json

import pytest
import torch
import yaml

import afno.tasks.scale as scale
from afno.core import read_params, root
from afno.sets import ClassPictures, Streets, prepare_classes, prepare_streets
from afno.tasks.base import publish

TIERS = ["smoke", "small", "paper"]
TINY = {"epochs": 1, "batch_size": 2, "warmup_steps": 0, "precision": "no", "workers": 0}
INVENTED = {
    name: {"model": p.model, "family": p.family, "size": p.size, "mixer": p.mixer, "parameters": 10**6 * (i + 1)}
    | {"miou": 0.3 + i / 100, "classes": 19}
    for i, (name, p) in enumerate(scale.points(root() / "params/smoke.yaml").items())
}


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    "Lay down four pictures and two scenes, tiny settings, and count trainings."
    prepare_streets(Streets("embedded", None, [32, 64], 2, 1, 0), tmp_path / "streets")
    prepare_classes(ClassPictures("embedded", None, 32, 4, 2, 0), tmp_path / "pictures")
    trained, fit = [], scale.fit

    def counted(model, loss, dataset, settings, out, *rest):
        trained.append(out.name)
        return fit(model, loss, dataset, settings, out, *rest)

    monkeypatch.setattr(scale, "fit", counted)

    def write(pretrain=0, finetune=None, **changed):
        told = read_params(root() / "params/smoke.yaml")
        told["scale"] |= {"crop": [32, 32], "scenes": None, **changed}
        first = pretrain if isinstance(pretrain, dict) else {"epochs": pretrain}
        told["scale"] |= {"pretrain": TINY | {"share": 1.0} | first, "finetune": TINY | (finetune or {})}
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(told))
        return tmp_path / "pictures", tmp_path / "streets", tmp_path / "params.yaml"

    def run(name, **changed):
        pictures, streets, params = write(**changed)
        found = scale.run_point(name, 0, pictures, streets, tmp_path / "keep" / name, params, progress=False)
        seen = trained.copy()
        trained.clear()
        return found, seen

    run.folder, run.write = tmp_path, write
    return run


@pytest.mark.parametrize("tier", TIERS)
def test_points_are_those_of_the_figure(tier):
    told = yaml.safe_load((root() / "paper.yaml").read_text())["scale_figure"]
    listed = scale.points(root() / f"params/{tier}.yaml")
    for size in told["segformer"]:
        for mixer in told["mixers"]:
            assert listed[f"segformer-{size.lower()}/{mixer}"].model == f"SegFormer-{size}"
    families = {}
    for point in listed.values():
        families.setdefault(point.family, []).append(point.size)
    assert sorted(families["Swin"]) == sorted(f"swin_{size.lower()}" for size in told["swin"])
    assert set(told["cnn"]) <= set(families) and len(listed) == len({p for p in listed.values()})


def test_parameters_are_the_models():
    listed = scale.points(root() / "params/smoke.yaml")
    told, _, _ = scale.load_scale(root() / "params/paper.yaml")
    for name in ("segformer-b0/gfn", "mobilenet_v2"):
        model = scale.build_point(listed[name], told)
        assert scale.parameters(listed[name], told) == sum(p.numel() for p in model.parameters())
    millions = {n: scale.parameters(listed[f"segformer-b3/{n}"], told) / 1e6 for n in told.mixers}
    assert all(43 < m < 52 for m in millions.values())  # Table 4 prints 45 for each


@pytest.mark.parametrize("name", ["segformer-b0/afno", "mobilenet_v2"])
def test_a_point_is_trained_once(prepared, name):
    found, seen = prepared(name, pretrain=1)
    assert seen == ["pretrain", "finetune"] and 0 <= found["miou"] <= 1 and found["parameters"] > 10**6
    assert prepared(name, pretrain=1) == (found, [])
    assert not list((prepared.folder / "keep").rglob("model.pt"))
    assert prepared(name, pretrain=1, finetune={"save_every": 7}) == (found, [])


def test_what_changes_the_scores_changes_the_fingerprint(prepared):
    point = scale.Point("SegFormer", "b0", "gfn")
    plain = scale.outcome(point, 0, *prepared.write())
    assert plain[0] == {} and scale.outcome(point, 0, *prepared.write()) == plain
    changes = [{"image_size": 32}, {"drop_path": 0.1}, {"crop": [16, 32]}, {"scale": [1.0, 1.0]}, {"mirror": False}]
    changes += [{"scenes": 1}, {"window": [32, 32]}, {"stride": [16, 16]}, {"finetune": {"lr": 0.01}}, {"pretrain": 1}]
    changes += [{"pretrain": {"epochs": 1, "share": 0.5}}]
    found = [plain, *(scale.outcome(point, 0, *prepared.write(**changed)) for changed in changes)]
    found += [
        scale.outcome(point, 1, *prepared.write()),
        scale.outcome(scale.Point("Swin", "swin_t", None), 0, *prepared.write()),
    ]
    assert len({json.dumps(complete, sort_keys=True) for _, complete in found}) == len(found)
    for same in ({"keep_weights": True}, {"sizes": ["b0"]}, {"trunks": []}, {"finetune": {"workers": 1}}):
        assert scale.outcome(point, 0, *prepared.write(**same)) == plain
    prepare_streets(Streets("embedded", None, [32, 64], 2, 1, 5), prepared.folder / "streets")
    assert scale.outcome(point, 0, *prepared.write()) != plain


def test_a_changed_setting_trains_again_and_back_gives_the_same(prepared):
    first, seen = prepared("mobilenet_v2")
    assert seen == ["finetune"]
    assert prepared("mobilenet_v2", mirror=False)[1] == ["finetune"]
    assert prepared("mobilenet_v2") == (first, ["finetune"])


def test_an_interrupted_point_goes_on(prepared, monkeypatch):
    measure = scale.measure_point
    monkeypatch.setattr(scale, "measure_point", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        prepared("mobilenet_v2", pretrain=1)
    monkeypatch.setattr(scale, "measure_point", measure)
    assert prepared("mobilenet_v2", pretrain=1)[1][2:] == []  # two before the interrupt, none after


def test_weights_are_kept_where_asked_for(prepared):
    assert prepared("mobilenet_v2")[1] == ["finetune"]
    found, seen = prepared("mobilenet_v2", keep_weights=True)
    weights = prepared.folder / "keep/mobilenet_v2/finetune/model.pt"
    assert seen == ["finetune"] and prepared("mobilenet_v2", keep_weights=True) == (found, [])
    publish(prepared.folder / "keep", prepared.folder / "out", ["mobilenet_v2"])
    published = sorted(
        p.relative_to(prepared.folder / "out").as_posix() for p in (prepared.folder / "out").rglob("*.*")
    )
    assert published == ["mobilenet_v2/finetune/log.csv", "mobilenet_v2/finetune/model.pt"]
    told, _, _ = scale.load_scale(root() / "params/smoke.yaml")
    model = scale.build_point(scale.Point("MobileNetV2", "mobilenet_v2", None), told)
    model.load_state_dict(torch.load(weights, weights_only=True))
    prepared("mobilenet_v2", keep_weights=True, pretrain=1)
    assert list(prepared.folder.glob("keep/*/*/model.pt")) == [weights]


def test_unknown_names_are_refused(prepared):
    with pytest.raises(ValueError, match=r"point='swin_x' is unknown; known are .*swin_t"):
        prepared("swin_x")
    for part, known in (("sizes", "b0"), ("mixers", "afno"), ("trunks", "swin_t")):
        with pytest.raises(ValueError, match=rf"scale\.{part}: 'nothing' is unknown; known are .*{known}"):
            prepared("mobilenet_v2", **{part: ["nothing"]})
    with pytest.raises(ValueError, match=r"scale\.scenes=9"):
        prepared("mobilenet_v2", scenes=9)


def test_figure_shows_every_point_and_the_same_bytes():
    import matplotlib.pyplot as plt

    figure, pictures = scale.figure1(INVENTED), []
    ax = figure.axes[0]
    drawn = {(round(x, 6), round(y, 6)) for line in ax.lines for x, y in zip(line.get_xdata(), line.get_ydata())}
    assert drawn == {(round(r["parameters"] / 1e6, 6), round(100 * r["miou"], 6)) for r in INVENTED.values()}
    assert len(ax.lines) == 6 and ax.get_xscale() == "log" and ax.get_xlabel() and ax.get_ylabel()
    assert len({line.get_color() for line in ax.lines}) == len({line.get_marker() for line in ax.lines}) == 6
    for found in (INVENTED, json.loads(json.dumps(INVENTED, sort_keys=True))):
        file = io.BytesIO()
        scale.figure1(found).savefig(file, dpi=150, format="png", metadata={"Software": None})
        pictures.append(file.getvalue())
    assert pictures[0] == pictures[1]
    plt.close("all")


def test_table_has_every_point_by_family_and_size():
    lines = [line.strip("| ").split(" | ") for line in scale.scale_table(INVENTED).splitlines()[2:]]
    assert len(lines) == len(INVENTED)
    assert [line[0] for line in lines][::3][:4] == [f"SegFormer-B{i}" for i in range(4)]
    assert [line[0] for line in lines][12:15] == ["Swin-T", "Swin-S", "Swin-B"]
    assert {line[1] for line in lines[:3]} == {"AFNO", "GFN", "Efficient SA"}
