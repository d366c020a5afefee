"""What the notebooks on clusters, sparsity and resolution do not show: odd shapes, ties, refusals, and that nothing is left behind."""

import numpy as np
import pytest
import torch
from torch import nn

from afno.clusters import ClusterSettings, agreement, layer_tokens, match_clusters, spectral_clusters, token_labels
from afno.core import seed_everything
from afno.mixers.afno import AFNO2D
from afno.models import vit
from afno.resolution import band_limited, layer_errors, rescale
from afno.sparsity import full_plane, radius, spectra
from afno.spectral import keep_modes

TOLD = ClusterSettings([1], 4, 10, None, 1, 0)


@pytest.fixture
def model():
    "A small AFNO with a threshold that zeros something."
    seed_everything(0, "test")
    return vit(
        "b4", "afno", (16, 24), dim=16, depth=2, mixer_settings={"num_blocks": 2, "sparsity_threshold": 0.01}
    ).eval()


def hooks(model: nn.Module) -> int:
    "Count the hooks of a model."
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# Clusters


def test_tokens_of_any_grid_and_no_hook_left(model):
    tokens = layer_tokens(model, torch.rand(2, 3, 16, 24), [2, 1])
    assert list(tokens) == [2, 1] and tokens[1].shape == (2, 4, 6, 16) and hooks(model) == 0


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_that_is_not_there_is_refused(model, layer):
    with pytest.raises(ValueError, match="layers 1 to 2") as error:
        layer_tokens(model, torch.rand(1, 3, 16, 24), [1, layer])
    assert "\n" not in str(error.value) and hooks(model) == 0


def test_equal_seeds_give_equal_clusters_and_too_many_neighbours_are_refused():
    tokens = torch.randn(6, 8, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    first = spectral_clusters(tokens, TOLD)
    np.random.seed(5)
    assert (first == spectral_clusters(tokens, TOLD)).all() and first.shape == (6, 8)
    with pytest.raises(ValueError, match="give at most 9"):
        spectral_clusters(tokens[:3, :3], TOLD)


def test_majority_takes_the_smaller_label_of_a_tie():
    labels = torch.tensor([[[0, 3, 1, 1], [3, 0, 1, 0]]])
    assert token_labels(labels, (1, 2)).tolist() == [[[0, 1]]]


def test_agreement_knows_no_numbers_and_punishes_missing_clusters():
    truth = np.array([[0, 0, 1, 1, 2, 2]])
    assert agreement(truth, truth + 5) == {"ari": 1.0, "miou": 1.0}
    found = agreement(truth, np.zeros_like(truth))
    assert found["ari"] == 0.0 and found["miou"] == pytest.approx(1 / 9)


def test_matching_renumbers_and_keeps_the_partition():
    reference, found = np.array([[0, 0, 1, 1]]), np.array([[3, 3, 0, 2]])
    matched = match_clusters(found, reference, 4)
    assert matched[0, 0] == matched[0, 1] == 0 and len(set(matched[0, 1:].tolist())) == 3


# Sparsity


@pytest.mark.parametrize("grid", [(4, 6), (5, 7), (6, 5)])
def test_the_plane_of_a_real_picture_is_its_full_spectrum(grid):
    x = torch.randn(2, *grid, dtype=torch.float64)
    plane = full_plane(torch.fft.rfft2(x).abs(), grid, keep_modes(grid))
    assert torch.allclose(plane, torch.fft.fftshift(torch.fft.fft2(x).abs(), (-2, -1)))
    assert radius(grid)[grid[0] // 2, grid[1] // 2] == 0


def test_dropped_coefficients_are_blank_and_batches_do_not_matter(model):
    for layer in model.modules():
        if isinstance(layer, AFNO2D):
            layer.modes = (3, 2)
    pictures, mask = torch.rand(5, 3, 16, 24), torch.zeros(5, 16, 24, dtype=torch.bool)
    whole = spectra(model, [(pictures, mask)])
    split = spectra(model, zip(pictures.split(2), mask.split(2)))
    assert np.isnan(whole[0].zeros).sum() == 4 * 6 - 9 and hooks(model) == 0
    for a, b in zip(whole, split):
        assert np.allclose(a.zeros, b.zeros, equal_nan=True) and np.allclose(a.per_block, b.per_block)
        assert np.allclose(a.log_magnitude, b.log_magnitude, equal_nan=True, atol=1e-5)


def test_models_without_afno_are_refused():
    with pytest.raises(ValueError, match="give a model with mixer afno"):
        spectra(vit("b4", "gfn", 16, dim=16, depth=1), [])


def test_an_error_leaves_hooks_and_threshold_as_they_were(model):
    with pytest.raises(ValueError, match="patch_size"):
        spectra(model, [(torch.rand(1, 3, 15, 24), torch.zeros(1, 15, 24, dtype=torch.bool))], 3.0)
    assert hooks(model) == 0 and {m.shrink.threshold for m in model.modules() if isinstance(m, AFNO2D)} == {0.01}


# Resolution


def test_a_function_is_the_same_on_every_grid():
    assert torch.allclose(band_limited(40, 2)[:, 2::5, 2::5], band_limited(8, 2))


def test_forward_is_invariant_and_the_published_layer_is_not():
    errors = layer_errors((8, 24), dim=8, seed=3)
    assert errors["forward, 5x3 coefficients"][1] < 1e-12
    assert min(v[1] for name, v in errors.items() if name.startswith("ortho")) > 1e-3


def test_rescaling_is_the_identity_on_the_own_grid_and_copies(model):
    x, before = torch.rand(1, 3, 16, 24), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        assert torch.allclose(rescale(model, (4, 6), (4, 6), band=True)(x), model(x), atol=1e-6)
        assert rescale(model, (4, 6), (8, 12), band=True)(torch.rand(1, 3, 32, 48)).shape == (1, 3, 32, 48)
    assert hooks(model) == 0 and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_rescaled_spectrum_is_as_large_as_in_training():
    "A constant picture has one coefficient; twice the side, twice the coefficient, half of it after rescaling."
    torch.manual_seed(0)
    layer = AFNO2D(4, 1, sparsity_threshold=0.0, skip="none", modes=(1, 1)).double()
    small, large = torch.ones(1, 4, 4, 4).double(), torch.ones(1, 8, 8, 4).double()
    mended = rescale(layer, (4, 4), (8, 8))
    assert torch.allclose(mended(large)[0, 0, 0], layer(small)[0, 0, 0])
