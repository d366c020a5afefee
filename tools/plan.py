"""Say what a tier would run, cost and need, without running anything.

  python3 tools/plan.py [--tier smoke|small|paper] [--tflops 100]

Days are an estimate: three times the forward pass's multiply-accumulates (two operations each), over the operations a second that a GPU
reaches (--tflops; 100 is ours, for bfloat16 on a large GPU). Reading pictures and validation are not counted.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import yaml

from afno.complexity import count
from afno.models import segformer
from afno.tasks.base import build_model

ROOT = Path(os.environ.get("AFNO_ROOT") or Path(__file__).resolve().parent.parent)
IMAGENET, STREETS = 1_281_167, 2_975  # training pictures of ImageNet-1K and of Cityscapes (section 5)

LAYOUTS = {"imagefolder": ("train", "val"), "cityscapes": ("leftImg8bit", "gtFine")}  # Folders inside


def counted(model, size: tuple[int, int]) -> tuple[int, int]:
    "Give multiply-accumulates of a picture, and parameters."
    found = count(model, (1, 3, *size))
    return found.total_macs, found.total_parameters


def runs_of(params: dict, path: Path) -> list[dict]:
    "List every training run with its pictures seen, multiply-accumulates a picture and parameters."
    rows, grid = [], params["grid"]

    def add(stage, mixer, pictures, epochs, model, size):
        macs, learned = counted(model, size)
        seeds = len(grid[stage.split(".")[0]]["seed"])
        rows.append(
            {
                "stage": stage,
                "mixer": mixer,
                "runs": seeds,
                "seen": pictures * epochs,
                "macs": macs,
                "parameters": learned,
            }
        )

    side, patch, crop = params["prepare"]["image_size"], params["prepare"]["patch_size"], params["segment"]["crop"]
    with torch.device("meta"):
        for mixer in grid["inpaint"]["mixer"]:
            pictures, model = params["prepare"]["train_crops"] or IMAGENET, build_model(mixer, side, patch, path)
            add("inpaint", mixer, pictures, params["inpaint"]["epochs"], model, (side, side))
        for mixer in grid["fewshot"]["mixer"]:
            few = sum(told["train"] or 0 for told in params["fewshot_sets"]["sets"].values())
            epochs, starts = params["fewshot"]["epochs"], 1 + params["fewshot"]["scratch"]
            add("fewshot", mixer, few * starts, epochs, build_model(mixer, side, patch, path), (side, side))
        own = params["class_pictures"]
        size, pictures, classes = (
            own["image_size"],
            own["train"] or IMAGENET,
            1000,
        )  # ImageNet's; fewer cost hardly less
        for mixer in grid["classify"]["mixer"]:
            model = build_model(mixer, size, params["classify"]["patch_size"], path, "classify", "classes", classes)
            add("classify", mixer, pictures, params["classify"]["epochs"], model, (size, size))
        told = params["segment"]
        shape = {name: told[name] for name in ("dims", "depths", "decoder_dim")}
        for mixer in grid["segment"]["mixer"]:
            shape["mixer_settings"] = told["mixer_settings"].get(mixer)
            first = segformer(told["size"], mixer, classes, "classes", size, **shape)
            add("segment.pretrain", mixer, pictures, told["pretrain"]["epochs"], first, (size, size))
            scenes, shares = params["streets"]["train"] or STREETS, len(told["shares"]) if mixer == "afno" else 1
            second = segformer(told["size"], mixer, img_size=size, **shape)
            add("segment.finetune", mixer, scenes * shares, told["finetune"]["epochs"], second, tuple(crop))
    return rows


def days(row: dict, tflops: float) -> float:
    "Estimate GPU-days of a row, all its seeds."
    return row["runs"] * row["seen"] * row["macs"] * 2 * 3 / (tflops * 1e12) / 86400


def data_of(params: dict) -> dict[str, str]:
    "List the data folders that a tier needs: folder -> present, what is missing, or that AFNO_DATA is not set."
    told = [params["prepare"], params["class_pictures"], params["streets"], *params["fewshot_sets"]["sets"].values()]
    needed = {
        name: LAYOUTS.get(t.get("source"), ()) for t in told for name in (t.get("folder"), t.get("val_folder")) if name
    }
    base, found = os.environ.get("AFNO_DATA"), {}
    for name, parts in sorted(needed.items()):
        absent = [part for part in (".", *parts) if base and not (Path(base) / name / part).is_dir()]
        here = "present" if not absent else "missing" if "." in absent else f"{', '.join(absent)} missing"
        found[name] = here if base else "AFNO_DATA is not set"
    return found


def plan(path: Path, tflops: float) -> str:
    "Write the plan of a parameter file."
    params = yaml.safe_load(path.read_text())
    rows, data = runs_of(params, path), data_of(params)
    lines = [
        f"tier {params['tier']}",
        "",
        f"{'stage':18}{'mixer':22}{'runs':>5}{'pictures seen':>15}{'M param.':>10}{'GMACs':>10}{'GPU-days':>11}",
    ]
    for row in rows:
        numbers = f"{row['runs']:5}{row['seen']:15,}{row['parameters'] / 1e6:10.2f}{row['macs'] / 1e9:10.3f}{days(row, tflops):11.3f}"
        lines.append(f"{row['stage']:18}{row['mixer']:22}{numbers}")
    total = sum(days(row, tflops) for row in rows)
    disk = (
        sum(row["runs"] * row["parameters"] * 4 * 4 for row in rows) / 1e9
    )  # weights, two moments, and the final model
    lines += ["", f"in all {total:.3f} GPU-days at {tflops:g} TFLOP/s (an estimate), {disk:.2g} GB of checkpoints"]
    lines += [f"data: {name}: {state}" for name, state in data.items()] or ["data: all of it is in the repository"]
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    "Read the command line and print the plan."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiers = sorted(path.stem for path in (ROOT / "params").glob("*.yaml"))
    parser.add_argument("--tier", choices=tiers, help="a file of params/; params.yaml if left out")
    parser.add_argument("--tflops", type=float, default=100.0, help="10^12 operations a second that a GPU reaches")
    told = parser.parse_args(given)
    if told.tflops <= 0:
        parser.error(f"--tflops {told.tflops:g} is not allowed; give more than 0")
    path = ROOT / "params" / f"{told.tier}.yaml" if told.tier else ROOT / "params.yaml"
    print(plan(path, told.tflops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
