"""Readers of data sets on small trees in the official layouts: what they give, and one line for each fault."""

import os
import pickle
import shutil

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from afno.datasets import (
    ADE_CAR_IDS,
    CELEBA_PARTS,
    DATASETGAN_KINDS,
    SHOTS,
    CelebAMaskHQ,
    Cityscapes,
    ClassFolders,
    DatasetGAN,
    PlainSegments,
    few_shot_split,
    open_segments,
    read_labels,
    resize_pair,
)


def noise(number, height, width):
    "A picture (height, width, 3) of its own."
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ids(number, height, width, count):
    "Class ids (height, width) below `count`."
    return np.random.default_rng(number).integers(0, count, (height, width), dtype=np.uint8)


def save(array, path, **more):
    "Write an array as picture or .npy, with its folders."
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array) if path.suffix == ".npy" else Image.fromarray(array).save(path, **more)


def complaint(make, *parts, error=(FileNotFoundError, ValueError)):
    "Hold a message to one line: what was found, what is allowed, what to do."
    with pytest.raises(error) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message and message.count("; ") >= 1, message
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


# Plain


@pytest.fixture
def plain(tmp_path):
    "Three pictures, .png and .jpg, of different sizes, four classes."
    base = tmp_path / "plain"
    for i, (name, size) in enumerate({"b.png": (6, 9), "a.jpg": (8, 5), "c.PNG": (7, 7)}.items()):
        save(noise(i, *size), base / "images" / name)
        save(ids(i, *size, 4), base / f"labels/{name[0]}.png")
    (base / "classes.txt").write_text("background\nhead\nbig nose\nmouth\n")
    return base


def test_plain_gives_pictures_and_labels(plain):
    reader = PlainSegments(plain)
    assert reader.names == ["a", "b", "c"] and len(reader) == 3
    assert reader.classes == ("background", "head", "big nose", "mouth")
    picture, labels = reader[1]
    assert picture.dtype == labels.dtype == torch.uint8
    assert np.array_equal(picture.permute(1, 2, 0), noise(0, 6, 9)) and np.array_equal(labels, ids(0, 6, 9, 4))
    assert torch.equal(reader[-1][1], reader[2][1])
    assert len(list(iter(reader))) == 3
    assert torch.equal(pickle.loads(pickle.dumps(reader))[1][0], picture)


def test_labels_may_be_palette_or_black_and_white_and_hold_255(plain):
    palette = Image.fromarray(ids(0, 6, 9, 4))
    palette.putpalette(list(range(255, -1, -1)) * 3)
    palette.save(plain / "labels/b.png")
    assert read_labels(plain / "labels/b.png").tolist() == ids(0, 6, 9, 4).tolist()
    Image.fromarray(ids(1, 8, 5, 2) > 0).save(plain / "labels/a.png")
    save(np.full((7, 7), 255, np.uint8), plain / "labels/c.png")
    reader = PlainSegments(plain)
    assert reader[0][1].tolist() == ids(1, 8, 5, 2).tolist() and (reader[2][1] == 255).all()


def test_plain_classes_may_be_numbered_or_lie_above(plain):
    (plain / "classes.txt").write_text("0 background\n1: head\n2\tbig nose\n3, mouth\n")
    assert PlainSegments(plain).classes == ("background", "head", "big nose", "mouth")
    (plain / "classes.txt").rename(plain.parent / "classes.txt")
    assert len(PlainSegments(plain).classes) == 4


def test_hidden_and_other_files_do_not_count(plain):
    (plain / "images/.d.png").write_bytes(b"")
    (plain / "images/notes.txt").write_text("")
    assert len(PlainSegments(plain)) == 3


def test_plain_complaints_when_opened(plain):
    def opened():
        return PlainSegments(plain)

    save(noise(0, 4, 4), plain / "images/d.png")
    complaint(opened, "images/d.png", "this picture has no labels", "labels/<name>.png", "add what is missing")
    save(noise(0, 4, 4), plain / "images/e.png")
    complaint(opened, "one of 2 pictures that have no labels")
    (plain / "images/d.png").unlink()
    (plain / "images/e.png").rename(plain / "images/a.png")
    complaint(opened, "a is there with two endings", "remove one")
    (plain / "images/a.png").unlink()
    save(ids(0, 4, 4, 4), plain / "labels/d.png")
    complaint(opened, "labels/d.png", "this label file has no picture")
    (plain / "labels/d.png").unlink()
    (plain / "classes.txt").write_text("1 head\n2 nose\n")
    complaint(opened, "classes.txt", "expected 0, 1, 2", "name every id")
    (plain / "classes.txt").write_text("\n")
    complaint(opened, "0 class names", "expected 1 to 255")
    (plain / "classes.txt").unlink()
    complaint(opened, "expected classes.txt, found images/, labels/", "one class name a line")
    shutil.rmtree(plain / "labels")
    complaint(opened, "labels: expected class ids, *.png, found no such folder (plain holds images/)")
    shutil.rmtree(plain / "images")
    (plain / "images").mkdir()
    complaint(opened, "images: expected pictures, *.jpg or *.png, found an empty folder", "put the data set there")
    complaint(lambda: PlainSegments(plain.parent / "plane"), "no such folder", error=FileNotFoundError)


def test_plain_complaints_when_read(plain):
    reader, path = PlainSegments(plain), plain / "labels/a.png"
    save(ids(1, 8, 6, 4), path)
    complaint(lambda: reader[0], str(path), "labels of 6x8 pixels for a picture of 5x8", "one id per pixel")
    save(np.full((8, 5), 4, np.uint8), path)
    complaint(lambda: reader[0], str(path), "unknown class id 4", "allowed are 0 to 3, and 255")
    save(noise(1, 8, 5), path)
    complaint(lambda: reader[0], str(path), "mode RGB", "8 bits a pixel")
    for content in (b"", b"text"):
        path.write_bytes(content)
        complaint(lambda: reader[0], str(path), "unreadable", "8-bit PNG of class ids", "replace it")
    path.unlink()
    complaint(lambda: reader[0], str(path), "unreadable")
    (plain / "images/b.png").write_bytes(b"text")
    complaint(lambda: reader[1], "images/b.png", "unreadable")


# CelebAMask-HQ


@pytest.fixture
def celeba(tmp_path):
    "Three faces of 32x32 pixels with masks of 16x16, in two of the mask folders."
    base = tmp_path / "CelebAMask-HQ"
    masks = base / "CelebAMask-HQ-mask-anno"
    for number in (12, 3, 2001):
        save(noise(number, 32, 32), base / f"CelebA-HQ-img/{number}.jpg", quality=95)
        for k, part in enumerate(("hair", "skin", "cloth")):
            mask = np.zeros((16, 16, 3), np.uint8)
            mask[4 * k :, : 6 + number % 5] = 255
            save(mask, masks / f"{number // 2000}/{number:05d}_{part}.png")
    return base


def test_celeba_paints_later_parts_over_earlier_ones(celeba):
    reader = CelebAMaskHQ(celeba)
    assert reader.names == ["3", "12", "2001"] and reader.classes == ("background", *CELEBA_PARTS)
    assert [reader.classes[i] for i in (1, 3, 13, 18)] == ["skin", "eye_g", "hair", "cloth"]
    picture, labels = reader[2]
    wanted = torch.zeros(16, 16, dtype=torch.uint8)
    for i, rows in ((1, slice(4, 16)), (13, slice(0, 16)), (18, slice(8, 16))):  # skin, hair, cloth, in this order
        wanted[rows, :7] = i
    assert torch.equal(labels, wanted) and picture.shape == (3, 16, 16)


def test_celeba_reduces_with_antialiasing(celeba):
    board = np.kron(np.indices((16, 16)).sum(0) % 2, np.ones((2, 2))).astype(np.uint8)[..., None] * np.uint8(254)
    for part in ("skin", "hair", "cloth"):
        save(np.full((4, 4), 255, np.uint8), celeba / f"CelebAMask-HQ-mask-anno/0/00003_{part}.png")
    save(board.repeat(3, 2), celeba / "CelebA-HQ-img/3.jpg", quality=100)
    picture, labels = CelebAMaskHQ(celeba)[0]
    assert (picture[:, 1:-1, 1:-1].float() - 127).abs().max() < 4 and (labels == 18).all()


def test_celeba_complaints(celeba):
    masks, pictures = celeba / "CelebAMask-HQ-mask-anno", celeba / "CelebA-HQ-img"

    def opened():
        return CelebAMaskHQ(celeba)

    save(ids(0, 16, 8, 2) * np.uint8(255), masks / "0/00003_skin.png")
    complaint(lambda: opened()[0], "00003_hair.png", "16x16 pixels, the masks before it are 8x16", "one size")
    save(ids(0, 16, 16, 2) * np.uint8(255), masks / "0/00003_skin.png")
    save(noise(0, 32, 24), pictures / "3.jpg")
    complaint(lambda: opened()[0], "3.jpg", "24x32 pixels, but its labels are 16x16", "same shape")
    (pictures / "3.jpg").write_bytes(b"text")
    complaint(lambda: opened()[0], "3.jpg", "unreadable")
    (masks / "0/00003_skin.png").write_bytes(b"text")
    complaint(lambda: opened()[0], "00003_skin.png", "unreadable")
    (masks / "0/00012_hair.png").rename(masks / "0/00012_beard.png")
    complaint(opened, "00012_beard.png", "no mask of a part", "parts are skin, nose", "rename or remove")
    (masks / "0/00012_beard.png").rename(masks / "1/00012_hair.png")
    complaint(opened, "1/00012_hair.png", "<i // 2000>")
    (masks / "1/00012_hair.png").unlink()
    save(noise(0, 32, 32), pictures / "4.jpg")
    complaint(opened, "4.jpg", "this picture has no labels", "at least one of its masks")
    (pictures / "4.jpg").unlink()
    (pictures / "12.jpg").unlink()
    complaint(opened, "00012_skin.png", "no picture", "CelebA-HQ-img/<i>.jpg")
    save(noise(0, 32, 32), pictures / "twelve.jpg")
    complaint(opened, "twelve.jpg", "expected a number")
    shutil.rmtree(pictures)
    complaint(opened, "CelebA-HQ-img", "no such folder (CelebAMask-HQ holds CelebAMask-HQ-mask-anno/)")


def test_celeba_without_masks(celeba):
    shutil.rmtree(celeba / "CelebAMask-HQ-mask-anno")
    complaint(lambda: CelebAMaskHQ(celeba), "CelebAMask-HQ-mask-anno", "masks of parts", "no such folder")


# DatasetGAN


def blocks(height, width, count):
    "Ids 0 .. count-1 as vertical stripes, (height, width)."
    return np.broadcast_to(np.arange(width) * count // width, (height, width)).astype(np.uint8)


def datasetgan_train(base, name, shots, size, count, dtype=np.int64):
    "Training files of one kind, and one too many."
    for i in range(shots + 1):
        save(np.full((*size, 3), 10 * i % 255, np.uint8), base / f"annotation/training_data/{name}/image_{i}.jpg")
        save(blocks(*size, count).astype(dtype), base / f"annotation/training_data/{name}/image_mask{i}.npy")


@pytest.mark.parametrize("kind", DATASETGAN_KINDS)
def test_datasetgan_takes_the_first_pictures_at_its_size(tmp_path, kind):
    told = DATASETGAN_KINDS[kind]
    stored = (told.size[0] // 4, told.size[1] // 4)
    count = 20 if kind == "ade-cars" else len(told.classes)
    datasetgan_train(tmp_path, told.train, told.shots, stored, count)
    reader = DatasetGAN(tmp_path, kind, "train")
    assert len(reader) == told.shots == SHOTS[kind.removeprefix("ade-")] and len(reader.classes) == len(told.classes)
    assert reader.names[:3] == ["image_0", "image_1", "image_2"]
    picture, labels = reader[2]
    assert picture.shape == (3, *told.size) and labels.shape == told.size and (picture.float() - 20).abs().max() <= 1
    wanted = blocks(*stored, count).repeat(4, 0).repeat(4, 1)
    assert np.array_equal(labels, np.array(ADE_CAR_IDS)[wanted] if kind == "ade-cars" else wanted)


def test_datasetgan_class_lists():
    assert [len(kind.classes) for kind in DATASETGAN_KINDS.values()] == [34, 20, 12, 16]
    for kind in DATASETGAN_KINDS.values():
        assert len(set(kind.classes)) == len(kind.classes) and kind.classes[0] == "background"


def test_datasetgan_small_parts_become_background(tmp_path):
    datasetgan_train(tmp_path, "cat_processed", 30, (256, 256), 3)
    path = tmp_path / "annotation/training_data/cat_processed/image_mask0.npy"
    mask = np.zeros((256, 256), np.int64)
    mask[0, :29], mask[5, :30] = 7, 8
    save(mask, path)
    labels = DatasetGAN(tmp_path, "cats", "train")[0][1]
    assert labels.unique().tolist() == [0, 8] and (labels == 8).sum() == 30
    save(mask.astype(np.float32)[..., None], path)
    assert torch.equal(DatasetGAN(tmp_path, "cats", "train")[0][1], labels)


def test_datasetgan_cuts_a_car_out_of_its_square_canvas(tmp_path):
    datasetgan_train(tmp_path, "car_processed", 16, (384, 512), 20)
    base, canvas = tmp_path / "annotation/training_data/car_processed", np.zeros((512, 512), np.uint8)
    canvas[64:448] = blocks(384, 512, 20)
    save(canvas, base / "image_mask3.npy")  # the mask alone
    save(np.stack([canvas * np.uint8(10)] * 3, -1), base / "image_4.jpg", quality=95)  # the picture alone
    reader = DatasetGAN(tmp_path, "cars", "train")
    assert torch.equal(reader[3][1], reader[0][1])
    assert (reader[4][0].float() - torch.from_numpy(blocks(384, 512, 20).astype(np.float32)) * 10).abs().mean() < 3


@pytest.mark.parametrize(
    "name, mask", [("image_{}.png", "image_mask{}.npy"), ("{}.jpg", "{}.npy"), ("a{:04d}.jpg", "{}_m.npy")]
)
def test_datasetgan_test_pictures_pair_by_name_or_number(tmp_path, name, mask):
    base = tmp_path / "annotation/testing_data/face_34_class"
    for i in (10, 9, 2):
        save(np.full((12, 8, 3), i, np.uint8), base / name.format(i))
        save(np.full((12, 8, 1), i, np.int64), base / mask.format(i))
    reader = DatasetGAN(tmp_path, "faces", "val")
    assert len(reader) == 3
    for picture, labels in reader:
        assert picture.shape == (3, 12, 8) and (picture[0].int() - labels.int()).abs().max() <= 1
    if "a{" in name:
        assert reader.names == ["a0002", "a0009", "a0010"]


def test_datasetgan_complaints(tmp_path):
    datasetgan_train(tmp_path, "face_processed", 16, (8, 8), 20)
    base = tmp_path / "annotation/training_data/face_processed"
    reader = DatasetGAN(tmp_path, "faces", "train")
    for array, parts in {
        "wide": (np.zeros((8, 9)), "8x8 pixels, but its labels are 9x8"),
        "real": (np.full((8, 8), 0.5), "(8, 8) of float64; expected class ids (h, w)"),
        "high": (np.full((8, 8), 300), "whole numbers from 0 to 255"),
        "deep": (np.zeros((2, 8, 8, 3)), "expected class ids (h, w)"),
        "more": (np.full((8, 8), 34), "unknown class id 34; allowed are 0 to 33"),
        "pickle": (np.array([{}], dtype=object), "unreadable"),
    }.values():
        save(array, base / "image_mask0.npy")
        complaint(lambda: reader[0], "image_", parts)
    (base / "image_mask0.npy").write_bytes(b"")
    complaint(lambda: reader[0], "image_mask0.npy: unreadable", "replace it")
    (base / "image_mask5.npy").unlink()
    complaint(lambda: DatasetGAN(tmp_path, "faces", "train"), "expected image_mask5.npy", "i from 0 to 15")
    (base / "image_2.jpg").unlink()
    complaint(lambda: DatasetGAN(tmp_path, "faces", "train"), "expected image_2.jpg")
    complaint(lambda: DatasetGAN(tmp_path, "cats", "train"), "cat_processed", "found no such folder")
    complaint(lambda: DatasetGAN(tmp_path, "dogs", "train"), "kind='dogs'", "faces, cars, ade-cars, cats")
    complaint(lambda: DatasetGAN(tmp_path, "faces", "test"), "split='test'", "train, val")


def test_datasetgan_test_complaints(tmp_path):
    complaint(lambda: DatasetGAN(tmp_path, "cars", "val"), "car_20_class: expected masks", "no such folder")
    base = tmp_path / "annotation/testing_data/car_ade_12_class"
    save(np.zeros((4, 4), np.int64), base / "1.npy")
    complaint(lambda: DatasetGAN(tmp_path, "ade-cars", "val"), "expected pictures", "found 1.npy", "ADE20K")
    save(noise(0, 4, 4), base / "1.jpg")
    assert len(DatasetGAN(tmp_path, "ade-cars", "val")) == 1
    save(noise(0, 4, 4), base / "2.jpg")
    complaint(lambda: DatasetGAN(tmp_path, "ade-cars", "val"), "2.jpg", "no labels", "same name or number")


# Cityscapes


@pytest.fixture
def streets(tmp_path):
    "Three scenes to learn from, one of them .jpg, and one to measure on."
    base = tmp_path / "cityscapes"
    for split, scenes in {"train": ("ulm_1_2", "bern_3_4", "bern_1_9"), "val": ("jena_0_0",)}.items():
        for i, name in enumerate(scenes):
            city, end = name.split("_")[0], "jpg" if name == "ulm_1_2" else "png"
            save(noise(i, 16, 32), base / f"leftImg8bit/{split}/{city}/{name}_leftImg8bit.{end}")
            save(ids(i, 16, 32, 34), base / f"gtFine/{split}/{city}/{name}_gtFine_labelIds.png")
            for other in ("instanceIds.png", "color.png", "polygons.json"):
                (base / f"gtFine/{split}/{city}/{name}_gtFine_{other}").write_bytes(b"")
    return base


def test_cityscapes_gives_train_ids(streets):
    reader = Cityscapes(streets, "train")
    assert reader.names == ["bern/bern_1_9", "bern/bern_3_4", "ulm/ulm_1_2"] and len(Cityscapes(streets, "val")) == 1
    assert len(reader.classes) == 19 and reader.classes[13] == "car"
    table = np.full(34, 255)
    for c in torchvision.datasets.Cityscapes.classes:
        if 0 <= c.train_id < 255:
            table[c.id] = c.train_id
    picture, labels = reader[0]
    assert np.array_equal(picture.permute(1, 2, 0), noise(2, 16, 32))
    assert labels.dtype == torch.uint8 and np.array_equal(labels, table[ids(2, 16, 32, 34)])
    assert reader[2][0].shape == (3, 16, 32)
    save(np.full((16, 32), 255, np.uint8), streets / "gtFine/train/bern/bern_1_9_gtFine_labelIds.png")
    assert (reader[0][1] == 255).all()


def test_cityscapes_complaints(streets):
    scene, target = (
        streets / "leftImg8bit/train/bern/bern_1_9_leftImg8bit.png",
        streets / "gtFine/train/bern/bern_1_9_gtFine_labelIds.png",
    )

    def opened(split="train"):
        return Cityscapes(streets, split)

    save(np.full((16, 32), 34, np.uint8), target)
    complaint(lambda: opened()[0], str(target), "unknown class id 34", "0 to 33, and 255")
    save(ids(0, 8, 16, 34), target)
    complaint(lambda: opened()[0], str(target), "labels of 16x8 pixels for a picture of 32x16")
    scene.write_bytes(b"text")
    complaint(lambda: opened()[0], str(scene), "unreadable")
    scene.unlink()
    complaint(opened, str(target), "this label file has no picture", "_leftImg8bit.png")
    target.rename(target.with_name("bern_3_3_gtFine_labelIds.png"))
    complaint(opened, "bern_3_3", "no picture")
    target.with_name("bern_3_3_gtFine_labelIds.png").unlink()
    save(noise(0, 16, 32), streets / "leftImg8bit/train/aachen/aachen_0_0_leftImg8bit.png")
    complaint(opened, "aachen_0_0_leftImg8bit.png", "this picture has no labels", "_gtFine_labelIds.png")
    shutil.rmtree(streets / "leftImg8bit/train/aachen")
    save(noise(0, 16, 32), streets / "leftImg8bit/train/ulm/ulm_1_2_leftImg8bit.png")
    complaint(opened, "as .png and as .jpg", "remove the other")
    (streets / "leftImg8bit/train/.DS_Store").write_bytes(b"")
    complaint(opened, ".DS_Store", "folders only", "remove it")
    complaint(lambda: opened("test"), "split='test'", "train, val")
    shutil.rmtree(streets / "leftImg8bit/val/jena")
    complaint(lambda: opened("val"), "leftImg8bit", "expected <city>/*_leftImg8bit.png, found an empty folder")
    shutil.rmtree(streets / "gtFine/train")
    complaint(opened, "gtFine", "_gtFine_labelIds.png", "found no such folder (gtFine holds val/)")
    complaint(lambda: Cityscapes(streets / "none", "val"), "no such folder", "unpack Cityscapes there")


# Choosing a reader


def test_open_segments_chooses_by_layout(plain, celeba, streets, monkeypatch):
    monkeypatch.setenv("AFNO_DATA", str(plain.parent))
    datasetgan_train(plain.parent / "gan", "cat_processed", 30, (16, 16), 3)
    assert isinstance(open_segments("plain", "plain", "train"), PlainSegments)
    assert isinstance(open_segments("celebamask-hq", "CelebAMask-HQ", "val"), CelebAMaskHQ)
    assert len(open_segments("cityscapes", "cityscapes", "val")) == 1
    assert len(open_segments("datasetgan", "gan", "train", kind="cats")) == 30


def test_open_segments_complaints(plain, monkeypatch):
    monkeypatch.setenv("AFNO_DATA", str(plain.parent))
    complaint(lambda: open_segments("voc", "plain", "train"), "'voc'", "plain, celebamask-hq, datasetgan, cityscapes")
    complaint(lambda: open_segments("plain", "plain", "test"), "split='test'", "train, val")
    complaint(lambda: open_segments("plain", "plain", "train", kind="cats"), "kind='cats'", "leave it out")
    complaint(lambda: open_segments("datasetgan", "gan", "train"), "kind=None", "faces, cars, ade-cars, cats")
    for folder in ("", "../plain", str(plain)):
        complaint(lambda: open_segments("plain", folder, "train"), repr(folder), "no folder below AFNO_DATA")
    monkeypatch.delenv("AFNO_DATA")
    complaint(lambda: open_segments("plain", "plain", "train"), "AFNO_DATA is not set")
    complaint(lambda: ClassFolders("imagenet", "train"), "AFNO_DATA is not set")


# Few pictures


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("count, train", [(1, 1), (16, 16), (17, 16), (295, 30), (800, 16)])
def test_few_shot_split_is_fixed_and_complete(count, train, seed):
    learn, rest = few_shot_split(count, train, seed)
    assert len(learn) == train and sorted(learn + rest) == list(range(count))
    assert (learn, rest) == (sorted(learn), sorted(rest)) and few_shot_split(count, train, seed) == (learn, rest)


def test_few_shot_split_spreads_or_draws():
    gaps = np.diff([*few_shot_split(295, 30)[0], 295])
    assert gaps.min() == 9 and gaps.max() == 10
    assert few_shot_split(100, 16, 0) != few_shot_split(100, 16, 1)
    for train in (0, 101):
        complaint(lambda: few_shot_split(100, train), f"train={train} of 100", "give 1 to 100")


# Resizing


@pytest.mark.parametrize("height, width, size", [(8, 8, 8), (30, 41, 7), (41, 30, 64), (5, 3, 1)])
def test_resize_pair_cuts_the_centre_and_keeps_ids(height, width, size):
    picture, labels = (
        torch.from_numpy(noise(0, height, width)).permute(2, 0, 1),
        torch.from_numpy(ids(0, height, width, 9)),
    )
    small, nearest = resize_pair(picture, labels, size)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    for i in range(size):
        for j in range(size):
            y, x = (2 * i + 1) * side // (2 * size), (2 * j + 1) * side // (2 * size)  # the pixel under the centre
            assert nearest[i, j] == labels[top + y, left + x]
    centre = picture[:, top : top + side, left : left + side].float()
    wanted = torch.nn.functional.interpolate(centre[None], (size, size), mode="bilinear", antialias=True)[0]
    assert small.shape == (3, size, size) and (small - wanted).abs().max() <= 1.5


def test_resize_pair_refuses_two_sizes():
    picture, labels = torch.zeros(3, 4, 6, dtype=torch.uint8), torch.zeros(6, 4, dtype=torch.uint8)
    complaint(lambda: resize_pair(picture, labels, 2), "labels of 4x6 pixels for a picture of 6x4", "one id per pixel")


# Classes


@pytest.fixture
def folders(tmp_path, monkeypatch):
    "Two classes of ImageNet, and their names in torchvision's meta.bin."
    monkeypatch.setenv("AFNO_DATA", str(tmp_path))
    for split in ("train", "val"):
        for wnid in ("n02012849", "n03126707", "n01440764"):
            for i in range(2):
                save(noise(i, 6, 8), tmp_path / f"imagenet/{split}/{wnid}/{i}.JPEG", format="JPEG")
    names = {"n02012849": ("crane",), "n03126707": ("crane",), "n01440764": ("tench", "Tinca tinca")}
    torch.save((names, []), tmp_path / "imagenet/meta.bin")
    return tmp_path / "imagenet"


def test_class_folders_agree_with_torchvisions_imagenet(folders):
    (folders / "train/n01440764/.hidden.JPEG").write_bytes(b"")
    (folders / "train/n01440764/notes.txt").write_bytes(b"")
    for split in ("train", "val"):
        reader, official = ClassFolders("imagenet", split), torchvision.datasets.ImageNet(folders, split)
        assert reader.samples == [s for s in official.samples if ".hidden" not in s[0]]
        assert list(reader.folders) == official.wnids
    assert reader.classes == ("tench", "crane (n02012849)", "crane (n03126707)")
    assert [name[0] for name in official.classes] == ["tench", "crane", "crane"]
    image, label = reader[2]
    assert image.mode == "RGB" and image.size == (8, 6) and label == 1 and reader.names[2] == "n02012849/0.JPEG"
    assert np.array_equal(image, official[2][0]) and len(pickle.loads(pickle.dumps(reader))) == 6


def test_class_folders_name_imagenette_and_other_classes(folders):
    (folders / "meta.bin").unlink()
    assert ClassFolders("imagenet", "val").classes == ("n01440764", "n02012849", "n03126707")
    for split in ("train", "val"):
        for old in ("n02012849", "n03126707"):
            shutil.rmtree(folders / split / old)
    os.rename(folders, folders.parent / "imagenette2-320")
    official = torchvision.datasets.Imagenette(folders.parent, "val", size="320px")
    assert ClassFolders("imagenette2-320", "val").classes == ("tench",) == (official.classes[0][0],)


def test_one_split_is_enough(folders):
    shutil.rmtree(folders / "train")
    assert len(ClassFolders("imagenet", "val")) == 6


def test_class_folders_complaints(folders):
    def opened(split="train"):
        return ClassFolders("imagenet", split)

    (folders / "train/n01440764/0.JPEG").write_bytes(b"text")
    complaint(lambda: opened()[0], "0.JPEG", "unreadable")
    (folders / "val/extra").mkdir()
    complaint(opened, "extra is a class of one split only", "same class folders in train and val")
    (folders / "train/extra").mkdir()
    complaint(opened, "extra: expected pictures of this class", "found an empty folder", "train and val")
    shutil.rmtree(folders / "val")
    (folders / "val").mkdir()
    complaint(lambda: opened("val"), "val: expected class folders", "found an empty folder")
    complaint(lambda: ClassFolders("imagenot", "val"), "val: expected class folders", "found no such folder")
    complaint(lambda: ClassFolders("../imagenet", "val"), "no folder below AFNO_DATA")
    complaint(lambda: opened("test"), "split='test'", "train, val")
