"""Metrics against formulas written out in NumPy and scikit-learn, and on odd input."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score

from afno.core import generator
from afno.metrics import ConfusionMatrix, classes_counted, complete, miou, per_class_iou, psnr, ssim


def pictures(count=3, size=(17, 13), seed=0):
    "Pictures, noisy copies, and masks."
    target = torch.rand(count, 3, *size, generator=generator("target", seed))
    pred = target + 0.2 * torch.randn(target.shape, generator=generator("pred", seed))
    return pred, target, torch.rand(count, *size, generator=generator("mask", seed)) < 0.3


def ssim_map(x, y):
    "Compute the SSIM map of one colour by its definition, window by window, where the 11x11 window lies inside."
    g = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    w = np.outer(g, g) / g.sum() ** 2
    out = np.full(x.shape, np.nan)
    for i in range(5, x.shape[0] - 5):
        for j in range(5, x.shape[1] - 5):
            a, b = (p[i - 5 : i + 6, j - 5 : j + 6] for p in (x, y))
            ma, mb = (w * a).sum(), (w * b).sum()
            va, vb, cov = (w * (a - ma) ** 2).sum(), (w * (b - mb) ** 2).sum(), (w * (a - ma) * (b - mb)).sum()
            out[i, j] = (2 * ma * mb + 1e-4) * (2 * cov + 9e-4) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
    return out


def test_psnr_is_its_formula_after_clamping():
    pred, target, mask = pictures()
    for i in range(3):
        error = (pred[i].double().clamp(0, 1) - target[i]).square().numpy()
        assert psnr(pred, target, reduction="none")[i].item() == pytest.approx(-10 * math.log10(error.mean()), abs=1e-4)
        hidden = error[:, mask[i].numpy()].mean()
        assert psnr(pred, target, mask, reduction="none")[i].item() == pytest.approx(-10 * math.log10(hidden), abs=1e-4)


def test_ssim_is_its_definition():
    pred, target, _ = pictures()
    inside = torch.zeros(3, 17, 13, dtype=torch.bool)
    inside[:, 5:-5, 5:-5] = True
    values = ssim(pred, target, inside, reduction="none")
    for i in range(3):
        x, y = pred[i].double().clamp(0, 1).numpy(), target[i].double().numpy()
        assert values[i].item() == pytest.approx(
            np.mean([np.nanmean(ssim_map(x[c], y[c])) for c in range(3)]), abs=1e-9
        )


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_only_masked_pixels_are_judged(metric):
    pred, target, _ = pictures(1, (40, 40))
    mask = torch.zeros(1, 40, 40, dtype=torch.bool)
    mask[:, :15] = True
    spoilt = pred.clone()
    spoilt[:, :, 25:] = 0  # beyond the window of every masked pixel
    assert metric(spoilt, target, mask) == metric(pred, target, mask)
    assert metric(spoilt, target) < metric(pred, target)


@pytest.mark.parametrize("metric", [psnr, ssim])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_gives_float64(metric, dtype):
    pred, target, mask = pictures()
    value = metric(pred.to(dtype).requires_grad_(), target.to(dtype), mask)
    assert value.dtype == torch.float64 and not value.requires_grad
    assert value == pytest.approx(metric(pred, target, mask).item(), rel=0.02)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_a_network_that_failed_is_not_hidden(metric):
    pred, target, _ = pictures()
    pred[1, 0, 5, 5] = float("nan")
    values = metric(pred, target, reduction="none")
    assert values.isnan().tolist() == [False, True, False] and metric(pred, target).isnan()


def test_small_noise_on_a_flat_picture_has_no_negative_variance():
    target = torch.full((1, 3, 16, 16), 0.999)
    pred = target + 1e-4 * torch.randn(target.shape, generator=generator(0))
    assert 0.999 < ssim(pred, target) <= 1


def test_completion_takes_from_both_and_changes_neither():
    pred, target, mask = pictures()
    done = complete(target, pred, mask)
    for c in range(3):
        assert torch.equal(done[:, c][mask], pred[:, c][mask]) and torch.equal(done[:, c][~mask], target[:, c][~mask])
    assert torch.equal(complete(target, pred, torch.ones_like(mask)), pred)
    with pytest.raises(ValueError, match=r"mask is torch.bool \(3, 17\); give bool \(3, 17, 13\) over pixels"):
        complete(target, pred, mask[..., 0])


def test_rounding_beyond_one_passes_and_normalised_pictures_do_not():
    pred, target, _ = pictures()
    assert psnr(pred, target + 1e-6).isfinite()
    with pytest.raises(ValueError, match=r"target lies in .* not normalised ones"):
        psnr(pred, (target - 0.45) / 0.225)


# Mean IoU


def test_against_scikit_learn():
    target = torch.randint(5, (4, 6, 7), generator=generator(1))
    guess = torch.where(
        torch.rand(target.shape, generator=generator(2)) < 0.6,
        target,
        torch.randint(5, target.shape, generator=generator(3)),
    )
    counts = ConfusionMatrix(5)
    counts.update(guess, target)
    t, g = target.flatten().numpy(), guess.flatten().numpy()
    assert np.array_equal(counts.matrix.numpy(), confusion_matrix(t, g))
    assert np.allclose(per_class_iou(counts.matrix).numpy(), jaccard_score(t, g, average=None))
    assert miou(counts.matrix) == pytest.approx(jaccard_score(t, g, average="macro"))


def test_absent_classes():
    matrix = torch.tensor([[4, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert per_class_iou(matrix)[:3].tolist() == [1, 0, 0] and per_class_iou(matrix)[3].isnan()
    assert miou(matrix) == pytest.approx(1 / 3) and classes_counted(matrix) == 3
    assert math.isnan(miou(torch.zeros(4, 4))) and classes_counted(torch.zeros(4, 4)) == 0


@pytest.mark.parametrize("ignore", [255, -1, -100])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_ignored_pixels_and_label_types(ignore, dtype):
    if dtype == torch.uint8 and ignore < 0:
        pytest.skip("no negative labels in uint8")
    target = torch.tensor([[[0, 1, ignore], [ignore, 1, 0]]], dtype=torch.int64).to(dtype)
    counts = ConfusionMatrix(2, ignore)
    counts.update(torch.tensor([[[0, 0, 1], [0, 1, 0]]], dtype=dtype), target)
    assert counts.matrix.tolist() == [[2, 0], [1, 1]]


def test_a_batch_of_ignored_pixels_counts_nothing():
    counts = ConfusionMatrix(2)
    counts.update(torch.zeros(1, 2, 2, dtype=torch.long), torch.full((1, 2, 2), 255))
    assert counts.matrix.sum() == 0


def test_nothing_is_ignored_when_told_so():
    counts = ConfusionMatrix(2, ignore_index=None)
    counts.update(torch.tensor([[0, 1]]), torch.tensor([[0, 0]]))
    assert counts.matrix.tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ValueError, match=r"target has values 255 .. 255; allowed are 0 .. 1; map"):
        counts.update(torch.tensor([[0]]), torch.tensor([[255]]))


def test_counts_beyond_float_precision():
    big = torch.tensor([[2**40, 1], [0, 2**40]])
    assert per_class_iou(big)[0].item() == 2**40 / (2**40 + 1)


def test_predictions_of_an_ignored_class_are_refused():
    with pytest.raises(ValueError, match=r"pred has values 0 .. 255"):
        ConfusionMatrix(2).update(torch.tensor([[0, 255]]), torch.tensor([[0, 255]]))
