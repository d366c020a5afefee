"""Choose what params.yaml runs: tier.py [TIER]   (standard library only)

With TIER, params/<TIER>.yaml is copied onto params.yaml; your own edits are first saved to params.yaml.bak.
Without, params.yaml stays as it is; only if it is missing, smoke is copied. Prints the tier.
"""

import os
import re
import shutil
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def read(path):
    "Read a file as bytes; None if there is none."
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def backup(path):
    "Copy a file to a name that is free: path.bak, path.bak1, ..."
    number, target = 0, path + ".bak"
    while read(target) not in (None, read(path)):
        number += 1
        target = f"{path}.bak{number}"
    shutil.copy(path, target)
    return os.path.basename(target)


def choose(root, tier=""):
    "Put the wanted parameters in place; return the tier and what there is to say."
    folder, target = os.path.join(root, "params"), os.path.join(root, "params.yaml")
    known = sorted(name[: -len(".yaml")] for name in os.listdir(folder) if name.endswith(".yaml"))
    if tier and tier not in known:
        raise SystemExit(f"no tier {tier!r}; tiers are {', '.join(known)}; see params/")
    has = read(target)
    own = has is not None and has not in [read(os.path.join(folder, f"{name}.yaml")) for name in known]
    said = []
    if has is None or (tier and has != read(os.path.join(folder, f"{tier}.yaml"))):
        if own:
            said.append(f"params.yaml held your own edits: they are kept in {backup(target)}")
        shutil.copy(os.path.join(folder, f"{tier or 'smoke'}.yaml"), target)
    elif own:
        said.append("params.yaml is none of the files in params/: your edits are run")
    found = re.search(rb"^tier: *[\"']?([A-Za-z0-9_-]+)", read(target), re.M)
    if not found:
        raise SystemExit("params.yaml has no line 'tier: ...'; name one of " + ", ".join(known))
    return found[1].decode(), said


if __name__ == "__main__":
    name, messages = choose(ROOT, *sys.argv[1:2])
    print(*messages, sep="\n", end="\n" if messages else "", file=sys.stderr)
    print(name)
