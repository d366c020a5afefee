"""Compile kernels for Hopper wherever there is Triton, in a process that does not interpret them."""

import os
import subprocess
import sys

import pytest

from afno.kernels import hopper

SHARED = 232448  # bytes of a multiprocessor
COMPILE = """
import importlib, re, subprocess, sys, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

module, kernels, tile, warps, floats, bytes_, registers = eval(sys.argv[1])
module = importlib.import_module(module)
tile = getattr(module, tile[0])(*tile[1])
for kernel in (getattr(module, name) for name in kernels):
    def kind(n):
        return "constexpr" if n == "G" else "fp32" if n == "lam" else "*fp32" if n in floats.split() else \
        "*i8" if n in bytes_.split() else \
        "*bf16" if n in "A Z Y X E GZ W1 B1 W2 B2 SZ SH SE SU".split() else "i32"
    names = kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kind(n)[0] == "*"}
    source = GluonASTSource(kernel, {n: kind(n) for n in names}, {(names.index("G"),): tile}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps or tile.warps, "maxnreg": registers})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "k.ptx").write_text(made.asm["ptx"])
        said = subprocess.run([tools / "ptxas", "-v", "--gpu-name=sm_90a", "k.ptx", "-o", "k"], cwd=folder, capture_output=True, text=True)
    said = said.stdout + said.stderr
    spilled = int(re.search(r"(\\d+) bytes spill stores", said)[1])
    print(kernel.__name__, made.metadata.shared, spilled, "serialized" in said)
"""


def check_compiled(
    module: str,  # Of the kernels
    kernels: tuple[str, ...],  # Names
    tile: tuple[str, tuple],  # Type and values of what they are compiled for
    warps: int = 0,  # 0: the tile says how many
    floats: str = "B1 B2 TW",  # Tensors of float32
    bytes_: str = "",  # Of int8
    spills: int = 128,  # Bytes of registers that may be spilled
    registers: int | None = None,  # That a thread may have at most
) -> None:
    "Compile, and ask for memory that is there, registers that suffice and products that overlap."
    pytest.importorskip("triton")
    if hopper.gluon is None:
        pytest.skip("this Triton has no Gluon")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    told = repr((f"afno.kernels.{module}", kernels, tile, warps, floats, bytes_, registers))
    run = subprocess.run([sys.executable, "-c", COMPILE, told], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.splitlines()
    assert len(lines) == len(kernels)
    for line in lines:
        name, shared, spilled, serialized = line.split()
        assert int(shared) <= SHARED, f"{name} needs {shared} bytes of shared memory, a multiprocessor has {SHARED}"
        assert int(spilled) <= spills, f"{name} spills {spilled} bytes of registers"
        assert serialized == "False", f"{name}: the assembler puts its products one after another"
