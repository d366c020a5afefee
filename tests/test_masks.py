"""The random-walk mask against a walk written in plain Python from the appendix's words."""

import pytest
import torch

from afno.core import generator
from afno.masks import random_walk_mask, upsample_mask, walk_table

GRIDS = [(1, 1), (1, 2), (2, 1), (1, 7), (2, 2), (3, 2), (5, 4), (9, 9)]


def walk_in_words(grid, steps, border, g):
    "Walk one mask, neighbour by neighbour, with the draws that `random_walk_mask` makes."
    H, W = grid
    at = divmod(int(torch.randint(H * W, (1,), generator=g)), W)
    draws = torch.randint(12, (steps, 1), generator=g, dtype=torch.uint8)
    seen = {at}
    for c in draws[:, 0].tolist():
        i, j = at
        around = [(i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]
        if border == "valid":
            around = [(r, c) for r, c in around if 0 <= r < H and 0 <= c < W] or [at]
        elif border == "clip":
            around = [(r, c) if 0 <= r < H and 0 <= c < W else at for r, c in around]
        else:
            around = [(r % H, c % W) for r, c in around]
        at = around[c % len(around)]
        seen.add(at)
    return torch.tensor([[(i, j) in seen for j in range(W)] for i in range(H)])


@pytest.mark.parametrize("border", ["valid", "clip", "wrap"])
@pytest.mark.parametrize("grid", GRIDS)
def test_equals_a_walk_in_words(grid, border):
    for seed in range(5):
        mask = random_walk_mask(grid, 15, border, generator=generator(seed))
        assert torch.equal(mask, walk_in_words(grid, 15, border, generator(seed)))


@pytest.mark.parametrize("grid", GRIDS)
def test_valid_picks_every_neighbour_equally_often(grid):
    H, W = grid
    table = walk_table(grid, "valid")
    for i in range(H):
        for j in range(W):
            around = [
                (i + a, j + b) for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1)) if 0 <= i + a < H and 0 <= j + b < W
            ]
            counts = {r * W + c: 12 // len(around) for r, c in around} or {0: 12}
            row = table[i * W + j].tolist()
            assert {n: row.count(n) for n in row} == counts


def test_masks_are_connected_and_no_longer_than_the_walk():
    for mask in random_walk_mask((12, 7), 60, batch=50, generator=generator("connected")):
        cells = {tuple(c) for c in mask.nonzero().tolist()}
        assert len(cells) <= 61
        reached, todo = set(), [next(iter(cells))]
        while todo:
            i, j = todo.pop()
            reached.add((i, j))
            todo += [c for c in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)) if c in cells - reached]
        assert reached == cells


def test_starts_are_uniform():
    starts = random_walk_mask((4, 5), 0, batch=20_000, generator=generator("start"))
    assert starts.flatten(1).sum(1).eq(1).all()
    count = starts.double().sum(0)  # 1000 each; chi square of 19 degrees of freedom is below 43.8 with chance 0.999
    assert ((count - 1000) ** 2 / 1000).sum() < 43.8


def test_shapes_types_and_the_global_generator():
    torch.manual_seed(3)
    first = random_walk_mask((6, 5), 9, batch=1)
    torch.manual_seed(3)
    assert torch.equal(first, random_walk_mask([6, 5], 9, batch=1))
    assert first.shape == (1, 6, 5) and first.dtype == torch.bool
    assert random_walk_mask((6, 5), 9).shape == (6, 5)
    assert random_walk_mask(batch=2).shape == (2, 56, 56)
    many = random_walk_mask((6, 5), 9, batch=8, generator=generator(0))
    assert len({tuple(m.flatten().tolist()) for m in many}) > 4  # walks of a batch differ
    assert not torch.equal(many, random_walk_mask((6, 5), 9, batch=8, generator=generator(1)))


def test_upsampling_repeats_each_token():
    mask = random_walk_mask((3, 5), 6, batch=2, generator=generator(0))
    pixels = upsample_mask(mask, 4)
    assert pixels.shape == (2, 12, 20)
    for i in range(12):
        for j in range(20):
            assert torch.equal(pixels[:, i, j], mask[:, i // 4, j // 4])
    with pytest.raises(ValueError, match=r"patch=0 .* give 1 or more"):
        upsample_mask(mask, 0)
