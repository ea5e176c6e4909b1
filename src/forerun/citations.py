"""BibTeX of the papers behind the parts: the entries of `citations.bib`, by their keys."""

from __future__ import annotations

import re
from importlib.resources import files

BIBTEX: dict[str, str] = {
    match[2]: match[0]
    for match in re.finditer(
        r"^@(\w+)\{(\S+),\n.*?^\}\n",
        files("forerun").joinpath("citations.bib").read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}
