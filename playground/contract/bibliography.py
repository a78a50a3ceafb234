"""The papers of strategies as BibTeX, from what the strategies cite. Imports neither torch nor gradio.

A strategy declares first author, year and identifier of its paper, but not the full list of authors: take it from the
paper's page, whose URL is in the entry. Titles are in assets/paper_titles.json, by arXiv identifier.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache

from playground.asset_files import ASSETS
from playground.contract.base import Strategy
from playground.contract.metadata import ARXIV, citation, link

NAMED = re.compile(r"(?P<authors>.+?) (?P<year>\d{4})(?:, arXiv .*)?")
SPECIAL = str.maketrans({character: f"\\{character}" for character in "&%$#_{}"})


def bibtex(classes: Iterable[type[Strategy]]) -> str:
    """One @misc entry per source, sorted by key; its note names the strategies. Empty if all are baselines."""
    sources: dict[str, list[type[Strategy]]] = {}
    for cls in classes:
        if citation(cls):
            # two works outside arXiv may share author and year
            sources.setdefault(cls.paper if ARXIV.fullmatch(cls.paper) else cls.name, []).append(cls)
    return "\n\n".join(sorted(_entry(source, found) for source, found in sources.items()))


@cache
def titles() -> dict[str, str]:
    """Title of each paper, by arXiv identifier."""
    return json.loads((ASSETS / "paper_titles.json").read_text(encoding="utf-8"))


def _entry(source: str, classes: list[type[Strategy]]) -> str:
    cited, paper = max((citation(cls) for cls in classes), key=len), classes[0].paper
    named = NAMED.fullmatch(cited)
    fields = {"author": _authors(named["authors"]), "year": named["year"]} if named else {}
    if title := titles().get(paper):
        fields["title"] = f"{{{title.translate(SPECIAL)}}}"  # inner braces keep the capitals
    if ARXIV.fullmatch(paper):
        fields |= {"eprint": paper, "archiveprefix": "arXiv", "url": link(classes[0])}
    fields["note"] = f"In the decoding playground: {', '.join(cls.name for cls in classes)}".translate(SPECIAL)
    lines = [f"  {name} = {{{value}}}" for name, value in fields.items()]
    return f"@misc{{{_key(named, source)},\n" + ",\n".join(lines) + "\n}"


def _authors(cited: str) -> str:
    """Names as BibTeX reads them: "Holtzman et al." is "Holtzman and others"; a name in lower case is not split."""
    if (first := cited.removesuffix(" et al.")) != cited:
        return f"{first} and others"
    return cited if cited[0].isupper() else f"{{{cited}}}"


def _key(named: re.Match[str] | None, source: str) -> str:
    """Such as holtzman2020-1904.09751: two works of one year may have first authors of the same name."""
    stem = re.sub(r"[^a-z]", "", named["authors"].split()[0].lower()) + named["year"] if named else "arxiv"
    return f"{stem}-{source.replace('_', '-')}"
