"""The GGUF file that an installed Python package ships: `package:NAME`.

No code of a package runs: only the folders that modules are imported from are read, without the
current one.
"""

from __future__ import annotations

import csv
import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path, PurePath

from rooflax.errors import CheckpointError

PREFIX = "package:"


def package_file(model: str) -> Path:
    """The file of "package:NAME".

    Args:
        model: with the name that pip knows, or the one that Python imports.

    Raises:
        CheckpointError: no such package, or it ships no GGUF file, or several.
    """
    name = model.removeprefix(PREFIX)
    if not re.fullmatch(r"\w([\w.-]{,98}\w)?", name, re.ASCII):
        raise CheckpointError(f"{name!r:.80} is not the name of a Python package.")
    here = Path.cwd()
    places = [place for place in sys.path if Path(place).resolve() != here.resolve()]
    known = list(distributions(name=name, path=places))
    try:
        listed = [file for one in known for file in one.files or () if _is_gguf(file)]
        # A list may name what is outside the package's own place.
        inside = [each for each in listed if not each.is_absolute() and ".." not in each.parts]
        shipped = {path for each in inside if (path := Path(str(each.locate()))).is_file()}
    except (OSError, ValueError, csv.Error) as error:
        raise CheckpointError(
            f"the list of files of the package {name} cannot be read ({error!s:.100})."
        ) from None
    spec = PathFinder.find_spec(re.sub("[.-]", "_", name), places)
    if spec is None and not known:
        raise CheckpointError(
            f"no package {name} is installed in {sys.prefix}; check the name, or install it with "
            "pip."
        )
    for folder in (spec and spec.submodule_search_locations) or ():
        shipped |= {file for file in Path(folder).rglob("*") if _is_gguf(file)}
    files = sorted({file.resolve() for file in shipped if file.is_file()})
    if not files:
        raise CheckpointError(f"the package {name} ships no GGUF file; give another MODEL.")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8]) + ", ..." * (len(files) > 8)
        raise CheckpointError(
            f"the package {name} ships {len(files)} GGUF files ({names}); give the path of one of "
            f"those in {files[0].parent}."
        )
    return files[0]


def _is_gguf(path: PurePath) -> bool:
    return path.suffix == ".gguf"
