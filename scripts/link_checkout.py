"""Makes this checkout visible to a Python that it cannot be installed into.

torch finds the backend `multigraph` by an entry point, and entry points live in an installed distribution's
metadata. Where nothing can be installed (a read-only environment, no build tools, no network), this writes
just that metadata, read from pyproject.toml, into a folder; with the folder and the checkout on PYTHONPATH
everything works as if installed.

    python scripts/link_checkout.py .here
    PYTHONPATH=.here:. python -c 'import torch; print(torch._dynamo.list_backends())'

Another project of this repository is named by its folder: `python scripts/link_checkout.py .here allocator_ext`.
"""

import sys
import tomllib
from pathlib import Path


def link(checkout: Path, target: Path) -> Path:
    """Writes the metadata of the checkout's distribution under `target` and returns its folder."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return info


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python scripts/link_checkout.py FOLDER [PROJECT]")
    link(Path(__file__).resolve().parent.parent / (sys.argv[2] if sys.argv[2:] else ""), Path(sys.argv[1]))
