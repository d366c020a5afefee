"Finetuning and its data: what is refused, what is resumed, and that few pictures are enough to beat the largest class."

import dataclasses
import json

import numpy as np
import pytest
import torch
import yaml

from afno.core import root
from afno.metrics import miou
from afno.models import vit
from afno.sets import (
    ClassItems,
    ClassPictures,
    FewshotSets,
    LabelledPictures,
    StreetCrops,
    Streets,
    prepare_classes,
    prepare_fewshot,
    prepare_streets,
)
from afno.tasks.base import confusion, load_backbone, pixel_cross_entropy
from afno.tasks.classify import Augment, check_mixing, train_transform, val_transform
from afno.tasks.fewshot import FewshotSettings, fewshot, finetune, score_table, validation_batches
from afno.tasks.inpaint import pretrain
from afno.tasks.segment import slide, window_starts
from afno.train import Interrupted, TrainSettings

ENTRY = {"layout": "embedded", "folder": None, "val_folder": None, "train": 8, "val": 6}
TINY = {"dim": 16, "depth": 1, "mixer_settings": {"num_blocks": 2, "sparsity_threshold": 0.001}}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    prepare_fewshot(FewshotSets(32, 0, {"faces": dict(ENTRY), "cats": dict(ENTRY)}), folder)
    return folder


@pytest.mark.parametrize(
    "change, said",
    [
        ({"layout": "voc"}, r"fewshot_sets.sets.faces: layout='voc' .* allowed is"),
        ({"layout": "plain"}, r"sets.faces.folder is null; layout plain needs a folder below AFNO_DATA"),
        ({"val": None}, r"sets.faces.val must be a number"),
        ({"shots": 3}, r"fewshot_sets.sets.faces: unknown parameter 'shots'"),
    ],
)
def test_wrong_set_is_refused_in_one_line(change, said, tmp_path):
    with pytest.raises(ValueError, match=said) as error:
        prepare_fewshot(FewshotSets(32, 0, {"faces": ENTRY | change}), tmp_path)
    assert "\n" not in str(error.value)


def test_generated_set_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no generated pictures of 'dogs'; there are"):
        prepare_fewshot(FewshotSets(32, 0, {"dogs": dict(ENTRY)}), tmp_path)


def test_missing_set_names_the_stage(tmp_path):
    with pytest.raises(FileNotFoundError, match="run: dvc repro prepare"):
        LabelledPictures.load(tmp_path / "faces.npz", "train")
    with pytest.raises(FileNotFoundError, match="run: dvc repro prepare"):
        ClassItems(tmp_path, "val", val_transform(32))


def test_plain_folder_is_split_by_the_fixed_rule(tmp_path, monkeypatch):
    from PIL import Image

    folder = tmp_path / "faces"
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for i in range(10):
        Image.fromarray(np.full((24, 40, 3), 20 * i, np.uint8)).save(folder / f"images/{i}.png")
        Image.fromarray(np.full((24, 40), i % 2, np.uint8)).save(folder / f"labels/{i}.png")
    (folder / "classes.txt").write_text("background\nface\n")
    monkeypatch.setenv("AFNO_DATA", str(tmp_path))
    entry = ENTRY | {"layout": "plain", "folder": "faces", "train": 4, "val": None}
    summary = prepare_fewshot(FewshotSets(16, 0, {"faces": entry}), tmp_path / "out")
    assert (summary["faces"]["train"], summary["faces"]["val"]) == (4, 6)
    train, val = (LabelledPictures.load(tmp_path / "out/faces.npz", split) for split in ("train", "val"))
    seen = {int(p[0, 0, 0]) for p in train.pictures} | {int(p[0, 0, 0]) for p in val.pictures}
    assert len(seen) == 10 and train.pictures.shape == (4, 3, 16, 16) and train.classes == ("background", "face")


def test_finetuning_resumes_to_the_same_weights(sets, tmp_path):
    train, val = (LabelledPictures.load(sets / "faces.npz", split) for split in ("train", "val"))
    settings = FewshotSettings(epochs=12, batch_size=8, lr=2e-3, clip_norm=None, validate_every=4, scratch=False)

    def model():
        torch.manual_seed(0)
        return vit("b4", "afno", 32, "segments", len(train.classes), **TINY)

    class Stops(LabelledPictures):
        "Ask to stop at the seventh step."

        def __getitem__(self, key):
            import os
            import signal

            if key[1] == 7:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(key)

    whole, parts = model(), model()
    finetune(whole, train, val, settings, tmp_path / "whole", tmp_path / "r1", 0, {}, "")
    broken = Stops(train.pictures, train.labels, train.classes)
    with pytest.raises(Interrupted):
        finetune(model(), broken, val, settings, tmp_path / "parts", tmp_path / "r2", 0, {}, "")
    finetune(parts, train, val, settings, tmp_path / "parts", tmp_path / "r2", 0, {}, "")
    for name in ("log.csv", "model.pt"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    found = score_table(whole, train, val, tmp_path / "whole")
    again = miou(confusion(whole, validation_batches(val, 3), len(val.classes)))
    assert found["last"] == pytest.approx(again, abs=1e-6) and found["best_epoch"] in (4.0, 8.0, 12.0)


def test_pretrained_weights_of_another_model_are_refused(tmp_path):
    torch.save(vit("b4", "afno", 32, **TINY).state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="pretrain with the same mixer, size and settings"):
        load_backbone(vit("b4", "gfn", 32, dim=16, depth=1), tmp_path / "model.pt")
    with pytest.raises(FileNotFoundError, match="no pretrained weights; `dvc repro` trains them"):
        load_backbone(vit("b4", "afno", 32, **TINY), tmp_path / "none.pt")


def test_a_picture_without_counted_pixels_has_no_loss_and_no_gradient():
    logits = torch.randn(2, 4, 5, 6, requires_grad=True)
    labels = torch.full((2, 5, 6), 255)
    pixel_cross_entropy(logits, labels).backward()
    assert logits.grad is not None and logits.grad.abs().sum() == 0


def test_crops_reach_beyond_the_scene_without_counting(tmp_path):
    prepare_streets(Streets("embedded", None, [32, 64], 2, 1, 0), tmp_path)
    from afno.sets import open_streets

    scenes = open_streets(tmp_path, "train")
    picture, labels = StreetCrops(scenes, (48, 80), (1.0, 1.0), False, 0)[0, 0]
    assert picture.shape == (3, 48, 80) and (labels[32:] == 255).all() and (labels[:, 64:] == 255).all()
    assert torch.equal(labels[:32, :64], scenes[0][1])


def test_class_pictures_are_the_same_in_every_process(tmp_path):
    prepare_classes(ClassPictures("embedded", None, 32, 20, 20, 0), tmp_path)
    deit = Augment([0.08, 1.0], 0.5, 0.3, "rand-m9-mstd0.5-inc1", 0.25, 0.8, 1.0, 0.1)
    items = ClassItems(tmp_path, "train", train_transform(32, deit), seed=3)
    loaders = [torch.utils.data.DataLoader(items, sampler=[(1, 5), (2, 5)], num_workers=n) for n in (0, 1)]
    for (a, _), (b, _) in zip(*loaders):
        assert torch.equal(a, b)


def test_odd_batches_cannot_be_mixed():
    deit = Augment([0.08, 1.0], 0.5, 0.3, None, 0.0, 0.8, 1.0, 0.1)
    with pytest.raises(ValueError, match="mixup pairs pictures; use an even number"):
        check_mixing(TrainSettings(epochs=1, batch_size=5), deit)


def test_windows_cover_every_pixel():
    for length, window, stride in ((10, 4, 3), (7, 9, 9), (100, 32, 32), (64, 64, 1)):
        covered = {p for s in window_starts(length, window, stride) for p in range(s, min(s + window, length))}
        assert covered == set(range(length))
    with pytest.raises(ValueError, match="does not cover a scene"):
        window_starts(100, 10, 11)
    pictures = torch.randn(1, 2, 13, 17)
    assert torch.allclose(slide(lambda x: 3 * x, pictures, (5, 8), (4, 3)), 3 * pictures, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_few_pictures_beat_the_largest_class(seed, tmp_path):
    "Pretrain AFNO by inpainting at smoke, shortened, and finetune it on each set."
    from afno.core import load_params
    from afno.data import PrepareSettings, prepare

    params = yaml.safe_load((root() / "params/smoke.yaml").read_text())
    params["inpaint"]["epochs"] = 12
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    told = tmp_path / "params.yaml"
    prepare(load_params("prepare", PrepareSettings, told), tmp_path / "prepare")
    summary = prepare_fewshot(load_params("fewshot_sets", FewshotSets, told), tmp_path / "sets")
    pretrain("afno", seed, tmp_path / "prepare", tmp_path / "inpaint", tmp_path / "r", told)
    rows = {}
    for kind in summary:
        train, val = (LabelledPictures.load(tmp_path / f"sets/{kind}.npz", split) for split in ("train", "val"))
        for start, weights in (("pretrained", tmp_path / "inpaint/model.pt"), ("scratch", None)):
            out = tmp_path / kind / start
            model = fewshot("afno", seed, kind, tmp_path / "sets", weights, out, tmp_path / "r" / kind / start, told)
            rows[kind, start] = score_table(model, train, val, out)
        assert rows[kind, "pretrained"]["last"] > 2 * rows[kind, "pretrained"]["majority"]
    print(
        json.dumps(
            {" ".join(key): {n: round(v[n], 3) for n in ("best", "last", "majority")} for key, v in rows.items()}
        )
    )


def test_settings_are_dataclasses_with_every_option():
    names = {f.name for f in dataclasses.fields(FewshotSettings)}
    assert {"accumulate", "ema", "validate_every", "scratch"} <= names
