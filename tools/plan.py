"""Say what a tier would run, cost and need, without training anything.

  python3 tools/plan.py [--tier smoke|small|paper] [--tflops 100]    estimate
  python3 tools/plan.py --tier small --measure 5                     time 5 steps of every training on this machine, and multiply

Estimated days are three times the forward pass's multiply-accumulates (two operations each), over the operations a second that a GPU
reaches (--tflops; 100 is ours, for bfloat16 on a large GPU). Measured ones hold memory traffic and launches too. Neither counts reading
pictures, nor validation.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import nn

from afno.complexity import count
from afno.models import segformer
from afno.tasks.ablate import build, cases, load_ablate
from afno.tasks.base import build_model
from afno.tasks.scale import build_point, load_scale, points

ROOT = Path(os.environ.get("AFNO_ROOT") or Path(__file__).resolve().parent.parent)
LAYOUTS = {"imagefolder": ("train", "val"), "cityscapes": ("leftImg8bit", "gtFine")}  # folders inside
PICTURES = {"imagenet": 1_281_167, "imagenette": 9_469, "cityscapes": 2_975}  # training pictures of a folder


@dataclass
class Training:
    "One training, or as many alike as there are seeds."

    stage: str  # "segment.finetune"
    label: str  # Mixer or knob
    seeds: int
    seen: int  # Pictures, all epochs
    batch: int  # Pictures a step
    precision: str  # "no" | "bf16" | "fp16"
    size: tuple[int, int]  # Height and width, pixels
    build: Callable[[], nn.Module]


def known(told: dict, key: str = "train") -> int:
    "Say how many training pictures a section names; all of its folder if null."
    return told.get(key) or PICTURES.get(told.get("folder") or "", PICTURES["imagenet"])


def trainings(params: dict, path: Path) -> Iterator[Training]:
    "List every training of a tier."
    grid, prep, own = params["grid"], params["prepare"], params["class_pictures"]
    side, patch, size = prep["image_size"], prep["patch_size"], own["image_size"]

    def item(stage, label, seen, settings, size, build):
        seeds = len(grid.get(stage.split(".")[0], {}).get("seed", [0]))
        batch, precision = settings["batch_size"] // settings.get("accumulate", 1), settings.get("precision", "no")
        return Training(stage, label, seeds, seen * settings["epochs"], batch, precision, size, build)

    for mixer in grid["inpaint"]["mixer"]:
        model = functools.partial(build_model, mixer, side, patch, path)
        yield item("inpaint", mixer, known(prep, "train_crops"), params["inpaint"], (side, side), model)
    few = sum(told["train"] or 0 for told in params["fewshot_sets"]["sets"].values())
    for mixer in grid["fewshot"]["mixer"]:
        model = functools.partial(build_model, mixer, side, patch, path)
        yield item("fewshot", mixer, few * (1 + params["fewshot"]["scratch"]), params["fewshot"], (side, side), model)
    for mixer in grid["classify"]["mixer"]:
        model = functools.partial(
            build_model, mixer, size, params["classify"]["patch_size"], path, "classify", "classes", 1000
        )
        yield item("classify", mixer, known(own), params["classify"], (size, size), model)
    told, scenes = params["segment"], known(params["streets"])
    for mixer in grid["segment"]["mixer"]:
        shape = {name: told[name] for name in ("dims", "depths", "decoder_dim")} | {
            "mixer_settings": told["mixer_settings"].get(mixer)
        }
        first = functools.partial(segformer, told["size"], mixer, 1000, "classes", size, **shape)
        second = functools.partial(segformer, told["size"], mixer, img_size=size, **shape)
        yield item("segment.pretrain", mixer, known(own), told["pretrain"], (size, size), first)
        shares = len(told["shares"]) if mixer == "afno" else 1
        yield item("segment.finetune", mixer, scenes * shares, told["finetune"], tuple(told["crop"]), second)
    small, told = load_ablate(path), params["ablate"]
    for knob in grid["ablate"]["knob"]:
        for case in cases(knob, path).values():
            model = functools.partial(build, case, small, side, patch_size=patch)
            yield item(
                "ablate.pretrain",
                knob,
                int(known(prep, "train_crops") * told["share"]),
                told["pretrain"],
                (side, side),
                model,
            )
            few = params["fewshot_sets"]["sets"][told["set"]]["train"] if knob != "blocks" else 0
            yield item("ablate.finetune", knob, few, told["finetune"], (side, side), model)
    told, share = load_scale(path)[0], params["scale"]["pretrain"]["share"]
    for point in points(path).values():
        label, crop = point.mixer or point.family, tuple(told.crop)
        first = functools.partial(build_point, point, told, "classes", 1000)
        yield item("scale.pretrain", label, int(known(own) * share), told.pretrain, (size, size), first)
        yield item("scale.finetune", label, scenes, told.finetune, crop, functools.partial(build_point, point, told))


def counted(training: Training) -> tuple[int, int]:
    "Give multiply-accumulates of a picture, and parameters."
    with torch.device("meta"):
        found = count(training.build(), (1, 3, *training.size))
    return found.total_macs, found.total_parameters


def estimated(training: Training, macs: int, tflops: float) -> float:
    "Estimate GPU-days, all seeds."
    return training.seeds * training.seen * macs * 2 * 3 / (tflops * 1e12) / 86400


def measured(training: Training, steps: int) -> float:
    "Time training steps on this machine, after as many that do not count, and multiply: days, all seeds."
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(training.precision)
    model = training.build().to(device).train()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.rand(training.batch, 3, *training.size, device=device)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for i in range(2 * steps):
        if i == steps:
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return training.seeds * training.seen / training.batch * (time.perf_counter() - begun) / steps / 86400


def rows_of(params: dict, path: Path, tflops: float, steps: int = 0) -> list[dict]:
    "Sum up trainings by stage and label."
    rows: dict[tuple[str, str], dict] = {}
    for one in trainings(params, path):
        macs, learned = counted(one)
        days = measured(one, steps) if steps and one.seen else estimated(one, macs, tflops)
        row = rows.setdefault((one.stage, one.label), {"runs": 0, "seen": 0, "parameters": 0, "macs": 0, "days": 0.0})
        row["runs"] += one.seeds * bool(one.seen)
        row["seen"] += one.seeds * one.seen
        row["parameters"] += one.seeds * learned * bool(one.seen)
        row["macs"] += one.seeds * one.seen * macs
        row["days"] += days
        if steps:
            print(f"{one.stage:18}{one.label:22}{24 * days:9.3f} hours", file=sys.stderr, flush=True)
    return [{"stage": stage, "label": label, **row} for (stage, label), row in rows.items() if row["runs"]]


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


def plan(path: Path, tflops: float, steps: int = 0) -> str:
    "Write the plan of a parameter file."
    params = yaml.safe_load(path.read_text())
    rows, data = rows_of(params, path, tflops, steps), data_of(params)
    lines = [f"tier {params['tier']}", ""]
    lines += [
        f"{'stage':18}{'mixer or knob':22}{'runs':>5}{'pictures seen':>15}{'M param.':>10}{'PMACs':>10}{'GPU-hours':>11}"
    ]
    for row in rows:
        numbers = f"{row['runs']:5}{row['seen']:15,}{row['parameters'] / row['runs'] / 1e6:10.2f}{row['macs'] / 1e15:10.3f}{24 * row['days']:11.2f}"
        lines.append(f"{row['stage']:18}{row['label']:22}{numbers}")
    total, disk = (
        sum(row["days"] for row in rows),
        sum(row["parameters"] * 4 * 4 for row in rows) / 1e9,
    )  # weights, two moments, final model
    how = (
        f"{steps} steps each on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'this CPU'}"
        if steps
        else f"{tflops:g} TFLOP/s (an estimate)"
    )
    lines += ["", f"in all {total:.2f} GPU-days ({24 * total:.1f} hours) at {how}, {disk:.2g} GB of checkpoints"]
    lines += [
        "runs, M param.: trainings, and parameters of one; PMACs: 10^15 multiply-accumulates of all forward passes"
    ]
    lines += ["other stages train nothing: prepare, evaluate, cluster, sparsity, resolution, complexity, speed, report"]
    lines += [f"data: {name}: {state}" for name, state in data.items()] or ["data: all of it is in the repository"]
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    "Read the command line and print the plan."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiers = sorted(path.stem for path in (ROOT / "params").glob("*.yaml"))
    parser.add_argument("--tier", choices=tiers, help="a file of params/; params.yaml if left out")
    parser.add_argument("--tflops", type=float, default=100.0, help="10^12 operations a second that a GPU reaches")
    parser.add_argument(
        "--measure", type=int, default=0, metavar="STEPS", help="time so many steps of every training on this machine"
    )
    told = parser.parse_args(given)
    if told.tflops <= 0:
        parser.error(f"--tflops {told.tflops:g} is not allowed; give more than 0")
    if told.measure < 0:
        parser.error(f"--measure {told.measure} is not allowed; give 1 or more steps, or leave it out for an estimate")
    path = ROOT / "params" / f"{told.tier}.yaml" if told.tier else ROOT / "params.yaml"
    print(plan(path, told.tflops, told.measure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
