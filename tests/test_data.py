"""What the notebook on data does not show: odd files, hidden files, fresh trees, and equal bytes from fresh processes."""

import csv
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from afno.core import generator, root
from afno.data import (
    PrepareSettings,
    crop_embedded,
    draw_masks,
    list_pictures,
    load_masks,
    load_prepared,
    prepare,
    random_box,
    read_picture,
    resize_box,
)

EMBEDDED = dict(
    source="embedded",
    folder=None,
    image_size=32,
    patch_size=4,
    train_crops=40,
    val_crops=70,
    mask_steps=None,
    mask_border="valid",
    seed=0,
)


def tree(base: Path, splits=("train", "val"), classes=("ant", "bee"), count=3, size=(50, 40)) -> None:
    "Make a data set in torchvision's layout; every picture has a colour of its own."
    for s, split in enumerate(splits):
        for c, kind in enumerate(classes):
            (base / split / kind).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", size, (100 * s, 100 * c, 10 * i)).save(base / split / kind / f"{i}.png")


@pytest.fixture
def sets(tmp_path, monkeypatch):
    "A folder of data sets, named by AFNO_DATA, with one data set `tiny` in it."
    monkeypatch.setenv("AFNO_DATA", str(tmp_path / "my sets"))
    tree(tmp_path / "my sets/tiny")
    return tmp_path / "my sets"


def folder_settings(**changes) -> PrepareSettings:
    "Settings for the data set `tiny`."
    return PrepareSettings(
        **{**EMBEDDED, "source": "imagefolder", "folder": "tiny", "train_crops": None, "val_crops": None, **changes}
    )


# Reading pictures


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "RGB"])
def test_every_kind_of_picture_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    if mode == "I;16":
        Image.fromarray(np.full((4, 5), 200 * 257, np.uint16)).save(path)
    else:
        Image.new("L", (5, 4), 200).convert(mode).save(path)
    picture = read_picture(path)
    assert picture.shape == (3, 4, 5) and picture.dtype == torch.uint8
    if mode in ("L", "LA", "RGBA", "RGB", "I;16", "P"):
        assert (picture == 200).all()


def test_rows_are_rows_and_red_is_red(tmp_path):
    image = Image.new("RGB", (6, 3))
    image.putpixel((5, 1), (250, 20, 10))
    image.save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png")[:, 1, 5].tolist() == [250, 20, 10]


@pytest.mark.parametrize("content", [b"", b"text", "cut jpeg", "cut png", "folder"])
def test_an_unreadable_picture_is_one_line_with_its_path(tmp_path, content):
    path = tmp_path / ("a.png" if content == "cut png" else "a.jpg")
    if content == "folder":
        path.mkdir()
    elif isinstance(content, str):
        Image.effect_noise((64, 64), 50).convert("RGB").save(path)
        path.write_bytes(path.read_bytes()[:-300])
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_picture(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value) and "unreadable" in str(error.value)


def test_a_missing_picture_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone.jpg: no such picture"):
        read_picture(tmp_path / "gone.jpg")


# The embedded photographs


def test_the_folder_is_what_the_tool_makes():
    spec = importlib.util.spec_from_file_location("embed_data", root() / "tools/embed_data.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    made = tool.files()
    there = {
        p.relative_to(root() / "data").as_posix(): p.read_bytes() for p in (root() / "data").rglob("*") if p.is_file()
    }
    assert there == made


def test_every_photograph_has_author_licence_and_source():
    with open(root() / "data/SOURCES.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    listed = [p.relative_to(root() / "data").as_posix() for s in ("train", "val") for p in list_pictures("embedded", s)]
    assert [r["file"] for r in rows] == listed and len(listed) == 13
    assert all(r["author"] and r["licence"] and r["source"].startswith("http") for r in rows)


def test_validation_has_four_colour_photographs():
    pictures = [read_picture(p).float() for p in list_pictures("embedded", "val")]
    assert len(pictures) == 4 and all((p[0] - p[2]).abs().mean() > 10 for p in pictures)


def test_missing_photographs_say_how_to_get_them(tmp_path, monkeypatch):
    (tmp_path / "params").mkdir()
    (tmp_path / "dvc.yaml").touch()
    monkeypatch.setenv("AFNO_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"expected photographs, found no such folder; run: dvc pull data.dvc"):
        list_pictures("embedded", "val")
    (tmp_path / "data/photos/train").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"data/photos/train: .* found an empty folder"):
        list_pictures("embedded", "train")


# Crops


def test_crops_do_not_depend_on_how_many_or_which_others():
    paths = list_pictures("embedded", "train")
    crops = crop_embedded(paths, 24, 30, seed=3)
    assert torch.equal(crop_embedded(paths, 24, 10, seed=3), crops[:10])
    n = len(paths)
    assert torch.equal(crop_embedded(paths[2:3], 24, 3, seed=3), crops[2 : 2 + 3 * n : n])
    assert not torch.equal(crop_embedded(paths, 24, 30, seed=4), crops)


def test_crops_lie_inside_and_have_many_scales(tmp_path):
    gradient = np.zeros((200, 400, 3), np.uint8)
    gradient[..., 0] = np.arange(400) // 2  # red tells the column, green the row
    gradient[..., 1] = np.arange(200)[:, None]
    Image.fromarray(gradient).save(tmp_path / "gradient.png")
    crops = crop_embedded([tmp_path / "gradient.png"], 16, 400, seed=0).double()
    height = (crops[:, 1, -1].mean(1) - crops[:, 1, 0].mean(1)) * 16 / 15
    width = 2 * (crops[:, 0, :, -1].mean(1) - crops[:, 0, :, 0].mean(1)) * 16 / 15
    assert (height - width).abs().max() < 4  # square
    assert height.min() < 20 and height.max() > 180
    assert 45 < height.median() < 70  # log-uniform between 16 and 200: the median is 57


# Reducing and cutting


def test_resize_box_averages_over_all_pixels():
    noise = torch.randint(256, (3, 40, 60), generator=generator(0), dtype=torch.uint8)
    image = Image.fromarray(noise.permute(1, 2, 0).numpy())
    exact = torch.nn.functional.interpolate(noise[None].double(), (5, 5), mode="bilinear", antialias=True)[0]
    assert (resize_box(image, (0, 0, 40, 60), 5) - exact).abs().max() <= 1
    assert torch.equal(resize_box(image, (3, 7, 20, 20), 20), noise[:, 3:23, 7:27])


def test_random_boxes_of_a_strip_fall_back_to_the_centre():
    assert random_box(1000, 10, generator(0)) == (0, 495, 10, 10)
    assert random_box(10, 1000, generator(0)) == (495, 0, 10, 10)
    assert random_box(1, 1, generator(0)) == (0, 0, 1, 1)


# A folder of pictures


def test_listing_skips_hidden_files_other_files_and_empty_classes(sets):
    (sets / "tiny/train/ant/._0.png").write_bytes(b"a system's shadow file")
    (sets / "tiny/train/ant/notes.txt").write_text("no picture")
    (sets / "tiny/train/cow").mkdir()
    names = [p.relative_to(sets / "tiny/train").as_posix() for p in list_pictures("imagefolder", "train", "tiny")]
    assert names == [f"{kind}/{i}.png" for kind in ("ant", "bee") for i in range(3)]


@pytest.mark.parametrize("folder", [None, "", "/tiny", "../tiny"])
def test_a_folder_must_lie_below_the_root(sets, folder):
    with pytest.raises(ValueError, match=r"no folder below AFNO_DATA; give its path from there"):
        list_pictures("imagefolder", "train", folder)


def test_a_missing_split_is_named_before_any_work(sets, tmp_path):
    tree(sets / "half", splits=("train",))
    with pytest.raises(FileNotFoundError, match=r"half/val: expected pictures in class folders, .* found train/; "):
        prepare(folder_settings(folder="half"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_prepared_folder_pictures(sets, tmp_path):
    summary = prepare(folder_settings(val_crops=4), tmp_path / "out")
    assert json.loads((tmp_path / "out/train.json").read_text())[4] == "tiny/train/bee/1.png"
    assert summary["val"] == {"pictures": 4, "counts": {"ant": 2, "bee": 2}}
    val = load_prepared(tmp_path / "out", "val")
    assert [tuple(p[:, 0, 0].tolist()) for p in val] == [(100, 0, 0), (100, 0, 10), (100, 100, 0), (100, 100, 10)]
    train = load_prepared(tmp_path / "out", "train", augment=True, seed=5)
    assert len(train) == 6 and all(train[i].shape == (3, 32, 32) for i in range(6))
    assert load_masks(tmp_path / "out").shape == (4, 8, 8)


def test_an_unaugmented_picture_is_the_centre(tmp_path, monkeypatch):
    monkeypatch.setenv("AFNO_DATA", str(tmp_path))
    tree(tmp_path / "tiny", count=1)
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[4:60, 36:92] = 255  # the centre square of 7/8 of the short side
    Image.fromarray(pixels).save(tmp_path / "tiny/val/ant/0.png")
    prepare(folder_settings(image_size=56), tmp_path / "out")
    assert (load_prepared(tmp_path / "out", "val")[0] == 255).all()


def test_augmentation_depends_on_seed_draw_and_index_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("AFNO_DATA", str(tmp_path))
    tree(tmp_path / "tiny", count=2)
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    for file in (tmp_path / "tiny/train").rglob("*.png"):
        Image.fromarray(noise).save(file)
    prepare(folder_settings(), tmp_path / "out")
    data = load_prepared(tmp_path / "out", "train", augment=True, seed=1)
    torch.manual_seed(0)
    first = {key: data[key] for key in ((0, 0), (0, 1), (1, 0))}
    torch.manual_seed(1)
    again = pickle.loads(pickle.dumps(data))
    assert all(torch.equal(again[key], first[key]) for key in reversed(first))
    assert torch.equal(data[0], first[0, 0])
    assert not torch.equal(first[0, 0], first[0, 1]) and not torch.equal(first[0, 0], first[1, 0])
    assert not torch.equal(load_prepared(tmp_path / "out", "train", augment=True, seed=2)[0, 0], first[0, 0])


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_broken_picture_stops_the_stage_and_leaves_no_summary(sets, tmp_path, split):
    prepare(folder_settings(), tmp_path / "out")
    (sets / f"tiny/{split}/bee/1.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"bee/1.png: unreadable"):
        prepare(folder_settings(), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"expected summary.json .* run: dvc repro prepare"):
        load_prepared(tmp_path / "out", split)


def test_a_vanished_picture_is_named_when_it_is_read(sets, tmp_path):
    prepare(folder_settings(), tmp_path / "out")
    (sets / "tiny/train/bee/1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"bee/1.png: no such picture"):
        load_prepared(tmp_path / "out", "train")[4]


# Preparing


def test_two_processes_prepare_the_same_bytes(tmp_path):
    code = "import sys; from afno.data import *; prepare(PrepareSettings(**eval(sys.argv[1])), sys.argv[2])"
    made = []
    for name, hash_seed in (("one", "1"), ("two", "2")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run(
            [sys.executable, "-c", code, repr(EMBEDDED), str(tmp_path / name)], check=True, env=env, cwd=root()
        )
        made.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert made[0] == made[1] and set(made[0]) == {"train.npy", "val.npy", "val_masks.npy", "summary.json"}


def test_the_summary_counts_what_is_there(tmp_path):
    summary = prepare(PrepareSettings(**EMBEDDED), tmp_path)
    masks, train, val = load_masks(tmp_path), np.load(tmp_path / "train.npy"), np.load(tmp_path / "val.npy")
    assert (train.shape, val.shape, masks.shape) == ((40, 3, 32, 32), (70, 3, 32, 32), (70, 8, 8))
    assert sum(summary["train"]["counts"].values()) == 40 and len(summary["train"]["counts"]) == 9
    share = [m.sum() / 64 for m in masks]
    assert summary["masked_share"] == {"mean": round(np.mean(share), 6), "sd": round(np.std(share), 6)}
    assert torch.equal(load_prepared(tmp_path, "val")[69], torch.from_numpy(val[69]))


def test_another_source_leaves_nothing_of_the_first(sets, tmp_path):
    prepare(PrepareSettings(**EMBEDDED), tmp_path / "out")
    prepare(folder_settings(), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "summary.json",
        "train.json",
        "val.json",
        "val_masks.npy",
    ]


def test_masks_follow_the_settings():
    base = PrepareSettings(**EMBEDDED)
    assert not np.array_equal(draw_masks(base, 5), draw_masks(PrepareSettings(**{**EMBEDDED, "seed": 1}), 5))
    assert (draw_masks(PrepareSettings(**{**EMBEDDED, "mask_steps": 0}), 5).sum((1, 2)) == 1).all()
    wrapped = draw_masks(PrepareSettings(**{**EMBEDDED, "mask_border": "wrap"}), 200).mean()
    assert wrapped > draw_masks(base, 200).mean() + 0.02


def test_indices_count_from_both_ends_and_end(tmp_path):
    prepare(PrepareSettings(**EMBEDDED), tmp_path)
    data = load_prepared(tmp_path, "train", augment=True)
    assert torch.equal(data[-1, 3], data[39, 3]) and len(list(data)) == 40
    with pytest.raises(IndexError):
        data[40]
    with pytest.raises(ValueError, match=r"split='test' is unknown; use one of train, val"):
        load_prepared(tmp_path, "test")


def test_half_of_the_draws_are_mirrored(tmp_path):
    prepare(PrepareSettings(**{**EMBEDDED, "train_crops": 3}), tmp_path)
    plain, data = load_prepared(tmp_path, "train"), load_prepared(tmp_path, "train", augment=True, seed=3)
    mirrored = sum(not torch.equal(data[1, draw], plain[1]) for draw in range(2000))
    assert abs(mirrored - 1000) < 4 * 2000**0.5 / 2


def test_a_copy_for_a_worker_carries_no_pictures(tmp_path):
    prepare(PrepareSettings(**EMBEDDED), tmp_path)
    data = load_prepared(tmp_path, "train", augment=True)
    first = data[0, 1]
    sent = pickle.dumps(data)
    assert len(sent) < 5000 < (tmp_path / "train.npy").stat().st_size
    assert torch.equal(pickle.loads(sent)[0, 1], first)
