"""What the notebooks on generated pictures do not show: odd shapes, equal bytes from fresh processes, splits, wrong settings."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import Cityscapes

from afno.core import generator
from afno.data import list_pictures
from afno.parts import OBJECT_CLASSES, PARTS, object_pictures, part_pictures
from afno.shapes import box, ellipse, fit, instance_map, paint, place, polygon
from afno.streets import CITIES, CITYSCAPES_CLASSES, CITYSCAPES_TRAIN_IDS, LABEL_IDS, street_scene, write_streets

GREY = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def photos():
    "The embedded training photographs."
    return list_pictures("embedded", "train")


def digest(tensor: torch.Tensor) -> str:
    "Name the content of a tensor."
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


# Painting


@pytest.mark.parametrize("angle", [0, 17, 45, 90, 133])
def test_turned_box_covers_the_samples_inside_it(angle):
    "A sample lies in a turned box if, turned back, it lies in the upright one."
    seen = instance_map(place([box(1, 0.31, 0.42, 0.77, 0.63, GREY)], angle=angle), (61, 61))
    y, x = (np.indices(seen.shape) + 0.5) / 61 - 0.5
    a = np.radians(angle)
    u, v = x * np.cos(a) + y * np.sin(a) + 0.5, -x * np.sin(a) + y * np.cos(a) + 0.5
    margin = np.min(np.abs([u - 0.31, u - 0.77, v - 0.42, v - 0.63]), 0)
    inside = (u > 0.31) & (u < 0.77) & (v > 0.42) & (v < 0.63)
    assert ((seen == 1) == inside)[margin > 1e-9].all()


def test_neighbours_share_no_sample_and_leave_none_out():
    "Two halves of the picture, cut along a slanted line, cover every sample exactly once."
    left = polygon(1, [(-0.1, -0.1), (0.3, -0.1), (0.72, 1.1), (-0.1, 1.1)], GREY)
    right = polygon(2, [(0.3, -0.1), (1.1, -0.1), (1.1, 1.1), (0.72, 1.1)], GREY)
    covers = [instance_map([part], (33, 50)) for part in (left, right)]
    assert (sum(covers) == 1).all()


def test_parts_outside_the_picture_are_cut():
    "Nothing is drawn beyond the border, whatever lies there."
    parts = [
        box(1, -3, -3, 0.5, 4, GREY),
        box(2, 5, 0, 6, 1, GREY),
        box(3, 0, -2, 1, -1, GREY),
        ellipse(4, (1, 1), (0.2, 0.2), GREY),
    ]
    seen = instance_map(parts, (20, 20))
    assert (seen[:10, :10] == 1).all() and set(np.unique(seen)) == {0, 1, 4}


def test_a_part_thinner_than_a_pixel_tints_but_does_not_break():
    "A hair-thin or empty polygon is no error."
    picture, labels = paint(
        [box(1, 0.5, 0, 0.5, 1, GREY), box(1, 0, 0.101, 1, 0.102, GREY)], torch.ones(3, 10, 10), generator(0)
    )
    assert picture.shape == (3, 10, 10) and labels.sum() == 0


def test_the_background_stays_where_nothing_is_painted():
    "Light and texture touch painted parts alone; edges are mixtures."
    behind = torch.rand(3, 30, 30, generator=generator(1))
    picture, labels = paint([box(1, 0.5, 0, 1, 1, (1, 0, 0))], behind, generator(2))
    assert torch.equal(picture[:, :, :15], (255 * behind[:, :, :15]).round().byte())
    assert (labels[:, 15:] == 1).all() and (labels[:, :15] == 0).all()


def test_paint_refuses_a_background_that_is_no_picture():
    with pytest.raises(ValueError, match=r"give \(3, height, width\)"):
        paint([], torch.zeros(4, 4), generator(0))


def test_fit_fills_the_unit_square():
    points = np.concatenate(
        [part.points for part in fit([ellipse(1, (3, 1), (2, 0.5), GREY), box(1, 0, 0, 1, 1, GREY)])]
    )
    assert np.allclose(points.min(0), 0) and np.allclose(points.max(0), 1)


# Objects


@pytest.mark.parametrize("kind", PARTS)
def test_pictures_do_not_depend_on_count_or_size(kind, photos):
    "Number i is the same in every set; labels at one size are those of three times the size, sampled."
    few, many, large = (part_pictures(kind, n, size, 5, photos) for n, size in ((2, 20), (4, 20), (2, 60)))
    assert all(torch.equal(a, b[:2]) for a, b in zip(few, many))
    assert torch.equal(few[1], large[1][:, 1::3, 1::3])
    assert few[0].shape == (2, 3, 20, 20) and few[0].dtype == few[1].dtype == torch.uint8


@pytest.mark.parametrize("kind", PARTS)
def test_every_part_occurs_often_at_32_pixels(kind, photos):
    classes = PARTS[kind][1]
    labels = part_pictures(kind, 40, 32, 7, photos)[1]
    present = [sum((one == i).sum() >= 3 for one in labels) / 40 for i in range(len(classes))]
    assert labels.max() < len(classes) and min(present) > 0.8, dict(zip(classes, present))


def test_pictures_differ_within_a_set_and_between_seeds(photos):
    pictures = torch.cat([part_pictures("cats", 4, 24, seed, photos)[0] for seed in (0, 1)])
    assert len({digest(one) for one in pictures}) == 8


def test_objects_are_balanced_and_take_opened_photographs(photos):
    opened = [Image.open(path).convert("RGB") for path in photos[:2]]
    pictures, classes = object_pictures(23, 16, 0, opened)
    assert torch.equal(classes, torch.arange(23) % len(OBJECT_CLASSES)) and pictures.shape == (23, 3, 16, 16)
    assert torch.equal(pictures, object_pictures(23, 16, 0, photos[:2])[0])


def test_a_fresh_process_draws_the_same(photos):
    "Neither hash seeds nor global generators nor threads matter."
    code = (
        "import torch, hashlib; torch.manual_seed(99); from afno.core import generator; from afno.data import list_pictures;"
        "from afno.parts import part_pictures; from afno.streets import street_scene;"
        "a = part_pictures('faces', 2, 24, 3, list_pictures('embedded', 'train')); b = street_scene((24, 48), generator(4));"
        "print(*(hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in (*a, *b)))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    here = [*part_pictures("faces", 2, 24, 3, photos), *street_scene((24, 48), generator(4))]
    assert there == [digest(tensor) for tensor in here]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda photos: part_pictures("dogs", 1, 32, 0, photos), "use one of faces, cars, cats"),
        (lambda photos: part_pictures("cats", 1, 0, 0, photos), "give 1 or more of both"),
        (lambda photos: object_pictures(0, 32, 0, photos), "give 1 or more of both"),
        (lambda photos: object_pictures(1, 32, 0, []), "give at least one photograph"),
    ],
)
def test_wrong_requests_end_in_one_line(call, message, photos):
    with pytest.raises(ValueError, match=message) as error:
        call(photos)
    assert "\n" not in str(error.value)


# Streets


def test_train_ids_are_the_official_ones():
    assert len(LABEL_IDS) == len(CITYSCAPES_CLASSES) == 19
    for known in Cityscapes.classes:
        if known.id >= 0:
            assert CITYSCAPES_TRAIN_IDS[known.id] == known.train_id % 256
            if known.train_id not in (-1, 255):
                assert CITYSCAPES_CLASSES[known.train_id] == known.name
    assert (CITYSCAPES_TRAIN_IDS[34:] == 255).all()


def test_all_classes_and_ignored_pixels_occur_in_32_scenes():
    wanted, found = {*LABEL_IDS, 1, 4}, set()
    for i in range(32):
        found |= set(street_scene((64, 128), generator("test", i))[1].flatten().tolist())
        if wanted <= found:
            break
    assert wanted <= found, wanted - found


@pytest.mark.parametrize("size", [(32, 64), (48, 48), (60, 33)])
def test_a_scene_of_any_size_shows_the_same_street(size):
    small, large = (street_scene((k * size[0], k * size[1]), generator("any", 0))[1] for k in (1, 3))
    assert torch.equal(small, large[1::3, 1::3])


def test_the_tree_is_read_by_torchvision_and_splits_share_no_city(tmp_path):
    write_streets(tmp_path, {"train": 4, "val": 3}, (24, 48), 1)
    cities = {}
    for split, count in (("train", 4), ("val", 3)):
        reader = Cityscapes(str(tmp_path), split=split, mode="fine", target_type="semantic")
        assert len(reader) == count
        picture, ids = reader[count - 1]
        assert (picture.mode, picture.size, ids.mode, ids.size) == ("RGB", (48, 24), "L", (48, 24))
        assert set(np.unique(ids)) <= {*LABEL_IDS, 0, 1, 4}
        cities[split] = {path.name for path in (tmp_path / "gtFine" / split).iterdir()}
    assert cities["train"] == set(CITIES["train"]) and cities["val"] == set(CITIES["val"])
    assert not cities["train"] & cities["val"]


def test_writing_again_gives_equal_bytes_and_leaves_other_cities_alone(tmp_path):
    "Fewer scenes than before leave none of the old ones; official cities beside them stay."
    other = tmp_path / "leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"official")
    write_streets(tmp_path, {"train": 3, "val": 1}, (16, 32), 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*_000000_*.png")}
    write_streets(str(tmp_path), {"train": 1, "val": 1}, (16, 32), 0)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.png")} == before
    assert other.read_bytes() == b"official" and len(before) == 5
    assert not [path for path in tmp_path.rglob(".*")]


@pytest.mark.parametrize("counts", [{"test": 1}, {"val": 0}, {"train": -2}])
def test_wrong_splits_and_counts_are_refused_before_anything_is_removed(tmp_path, counts):
    write_streets(tmp_path, {"val": 1}, (16, 32), 0)
    with pytest.raises(ValueError) as error:
        write_streets(tmp_path, counts, (16, 32), 0)
    assert "\n" not in str(error.value) and len(list(tmp_path.rglob("*.png"))) == 2


@pytest.mark.parametrize("size", [(0, 8), (8,), (8, -1)])
def test_a_scene_without_pixels_is_refused(size):
    with pytest.raises(ValueError, match="give \\(height, width\\)"):
        street_scene(size, generator(0))
