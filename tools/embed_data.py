"""Make data/, the embedded photographs, from files that scikit-image and scikit-learn install: python tools/embed_data.py [FOLDER]

Original bytes, checked by hash, so that any version of the two packages gives the same folder or none. `dvc pull data.dvc`
restores that folder without them; this script says where it came from. Photographs without a stated licence stay out.
"""

import csv
import hashlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import NamedTuple

SKIMAGE, SKLEARN = ("skimage", "data"), ("sklearn", "datasets", "images")
CC0, CC_BY = "CC0 1.0", "CC BY 2.0"
PUBLIC = "public domain"


class Photo(NamedTuple):
    "One photograph: where it is found, what it shows, who made it, and under which terms it may be passed on."

    split: str
    name: str
    package: tuple[str, ...]
    shows: str
    author: str
    licence: str
    source: str
    sha256: str


PHOTOS = [
    Photo("train", "brick.png", SKIMAGE, "brick wall, grey", "CC0Textures", CC0, "https://cc0textures.com/view.php?tex=Bricks25", "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf"),
    Photo("train", "camera.png", SKIMAGE, "photographer with a camera on a lawn, grey", "Lav Varshney", CC0, "https://scikit-image.org/docs/stable/api/skimage.data.html#skimage.data.camera", "b0793d2adda0fa6ae899c03989482bff9a42d3d5690fc7e3648f2795d730c23a"),
    Photo("train", "china.jpg", SKLEARN, "temple roof under a blue sky", "danielbuechele", CC_BY, "https://www.flickr.com/photos/danielbuechele/6061409035/", "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29"),
    Photo("train", "coins.png", SKIMAGE, "Greek coins from Pompeii, grey", "Brooklyn Museum", "no known copyright restrictions", "https://www.brooklynmuseum.org/opencollection/archives/image/51611", "f8d773fc9cfa6f4d8e5942dc34d0a0788fcaed2a4fefbbed0aef5398d7ef4cba"),
    Photo("train", "grass.png", SKIMAGE, "grass, grey", "linolafett", CC0, "https://www.deviantart.com/linolafett/art/Grass-01-434853879", "b6b6022426b38936c43a4ac09635cd78af074e90f42ffa8227ac8b7452d39f89"),
    Photo("train", "gravel.png", SKIMAGE, "gravel, grey", "CC0Textures", CC0, "https://cc0textures.com/view.php?tex=Gravel04", "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12"),
    Photo("train", "hubble_deep_field.jpg", SKIMAGE, "galaxies, Hubble eXtreme Deep Field", "NASA", PUBLIC, "http://hubblesite.org/newscenter/archive/releases/2012/37/image/a/", "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4"),
    Photo("train", "retina.jpg", SKIMAGE, "retina of an eye", "Mikael Häggström", CC0, "https://commons.wikimedia.org/wiki/File:Fundus_photograph_of_normal_left_eye.jpg", "38a07f36f27f095e818aea7b96d34202c05176d30253c66733f2e00379e9e0e6"),
    Photo("train", "rocket.jpg", SKIMAGE, "launch of a Falcon 9 rocket", "SpaceX", PUBLIC, "https://www.flickr.com/photos/spacexphotos/16511594820/", "c2dd0de7c538df8d111e479619b129464d0269d0ae5fd18ca91d33a7fdfea95c"),
    Photo("val", "astronaut.png", SKIMAGE, "Eileen Collins, astronaut", "NASA", PUBLIC, "https://flic.kr/p/r9qvLn", "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5"),
    Photo("val", "chelsea.png", SKIMAGE, "Chelsea the cat", "Stefan van der Walt", CC0, "https://scikit-image.org/docs/stable/api/skimage.data.html#skimage.data.chelsea", "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"),
    Photo("val", "coffee.png", SKIMAGE, "cup of coffee on a wooden table", "Rachel Michetti", CC0, "https://scikit-image.org/docs/stable/api/skimage.data.html#skimage.data.coffee", "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7"),
    Photo("val", "flower.jpg", SKLEARN, "dahlia", "vultilion", CC_BY, "https://www.flickr.com/photos/vultilion/6056698931/", "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638"),
]  # fmt: skip

README = """# The embedded photographs

`photos/train` and `photos/val` hold real photographs with their original bytes, as scikit-image and scikit-learn ship them; no
photograph and no scene is in both. `SOURCES.csv` lists what each shows, its author, licence and source.

- CC BY 2.0 (https://creativecommons.org/licenses/by/2.0/): {by}
- CC0 1.0 (https://creativecommons.org/publicdomain/zero/1.0/): {cc0}
- Public domain, or no known copyright restrictions: {public}

scikit-learn's notice names danielbuechele for both of its photographs; its link for flower.jpg leads to vultilion.
`python tools/embed_data.py` makes this folder again from the two packages.
"""


def read_photo(photo: Photo) -> bytes:
    "Read a photograph from the package that ships it, refusing other bytes than the listed ones."
    spec = importlib.util.find_spec(photo.package[0])
    if spec is None or spec.origin is None:
        raise SystemExit(f"{photo.package[0]} is not installed; run: pip install scikit-image scikit-learn")
    path = Path(spec.origin).parent.joinpath(*photo.package[1:], photo.name)
    if not path.exists():
        raise SystemExit(f"{photo.package[0]} has no {photo.name} any more; restore data/ with: dvc pull data.dvc")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != photo.sha256:
        raise SystemExit(f"{photo.package[0]}'s {photo.name} has changed; restore data/ with: dvc pull data.dvc")
    return content


def files() -> dict[str, bytes]:
    "Make every file of the folder, by its path in the folder."
    made = {f"photos/{p.split}/{p.name}": read_photo(p) for p in PHOTOS}
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", "shows", "author", "licence", "source", "sha256"])
    writer.writerows([f"photos/{p.split}/{p.name}", p.shows, p.author, p.licence, p.source, p.sha256] for p in PHOTOS)
    made["SOURCES.csv"] = table.getvalue().encode()
    said = {"by": [], "cc0": [], "public": []}
    for p in PHOTOS:
        said["by" if p.licence == CC_BY else "cc0" if p.licence == CC0 else "public"].append(f"{p.name} ({p.author})")
    made["README.md"] = README.format(**{k: ", ".join(v) for k, v in said.items()}).encode()
    return made


def main() -> None:
    "Write the folder."
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "data"
    made = files()
    for name, content in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    extra = [
        str(p.relative_to(folder))
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.relative_to(folder).as_posix() not in made
    ]
    print(
        f"{folder}: {len(PHOTOS)} photographs, {sum(map(len, made.values())) / 1e6:.1f} MB{'; not ours: ' + ', '.join(extra) if extra else ''}"
    )


if __name__ == "__main__":
    main()
