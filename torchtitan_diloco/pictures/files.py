"""A picture as a file, in the format that its name asks for."""

from pathlib import Path

from torchtitan_diloco.pictures.png import write_png
from torchtitan_diloco.pictures.scene import Scene
from torchtitan_diloco.pictures.svg import to_svg

ENDINGS = (".png", ".svg")


def check_picture_path(path: Path, flag: str) -> None:
    """Before what is drawn has taken long."""
    if path.suffix not in ENDINGS:
        raise ValueError(
            f'{flag} "{path}": a picture ends in {" or ".join(ENDINGS)}; write {path.with_suffix(".png")}'
        )
    if not path.parent.is_dir():
        raise ValueError(
            f'{flag} "{path}": there is no folder {path.parent}; make it, or give another name'
        )


def write_picture(scene: Scene, path: Path) -> None:
    if path.suffix == ".svg":
        path.write_text(to_svg(scene, standalone=True), encoding="utf-8")
    else:
        write_png(scene, path)
