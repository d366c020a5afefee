"The battery on every mixer at its defaults, one counted test a check; code generation in the slow suite."

import pytest
import torch

from afno.mixers import AFNO1D, MIXERS, build_mixer
from afno.mixers.checks import CHECKS, compiles_with

SETTINGS = {
    "attention": {"num_heads": 2},
    "efficient_attention": {"num_heads": 2, "reduction": 2},
    "longshort": {"num_heads": 2},
    "gfn": {},
    "fno": {"num_blocks": 2},
    "afno": {"num_blocks": 2},
}


def builder(name):
    def build(grid):
        torch.manual_seed(0)
        mixer = build_mixer(name, 8, grid=grid, **SETTINGS[name])
        if name == "afno":
            with torch.no_grad():  # or shrinkage would silence so narrow a layer
                for p in mixer.parameters():
                    p.mul_(15)
        return mixer

    return build


def test_every_mixer_is_in_the_battery():
    assert set(SETTINGS) == set(MIXERS)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", SETTINGS)
def test_battery(name, check):
    CHECKS[check](builder(name), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_inductor(name):
    compiles_with("inductor", builder(name), 8)


def test_sequence_mixer_refuses_a_grid():
    with pytest.raises(ValueError, match=r"allowed is \(B, N, 12\); use AFNO2D"):
        AFNO1D(12, num_blocks=3)(torch.zeros(1, 4, 4, 12))
