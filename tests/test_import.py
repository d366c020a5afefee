"""The package imports without a GPU, without Triton and without what only notebooks need."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / "afno").rglob("*.py") if path.stem != "_modidx"]
MODULES = sorted(".".join(path.parts).removesuffix(".__init__") for path in FILES)
HEAVY = ["matplotlib", "sklearn", "skimage", "accelerate", "torchmetrics", "torchvision", "pandas", "tensorboard"]


def python(code):
    "Run code in a fresh Python without a GPU."
    command = [sys.executable, "-W", "error::UserWarning:afno", "-c", code]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_all_modules_import_without_triton_and_cuda():
    assert "afno.mixers.afno" in MODULES
    code = f"""
import importlib, sys, types
sys.modules["triton"] = None
import torch
class NoCuda(types.ModuleType):
    def __getattr__(self, name): raise AssertionError(f"torch.cuda.{{name}} was used at import")
quiet = ("is_available", "is_bf16_supported", "device_count")
kept = {{name: getattr(torch.cuda, name) for name in quiet}}
import torchvision, torch.utils.data, torch.distributed, torch._dynamo, accelerate, torchmetrics  # their own use of it is theirs
torch.cuda = NoCuda("torch.cuda")
torch.cuda.__dict__.update(kept)
for name in {MODULES!r}: importlib.import_module(name)
"""
    python(code)


def test_mixers_import_nothing_heavy():
    code = f"import afno.mixers, afno.spectral, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python(code).strip() == "[]"
