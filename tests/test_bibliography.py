"""The BibTeX of the strategies' papers: well formed, complete, and without surplus entries."""
from __future__ import annotations

import re

import pytest

from playground.cli import main
from playground.contract import discover
from playground.contract.bibliography import bibtex, titles
from playground.contract.metadata import ARXIV, BASELINE, citation

CLASSES = {name: cls for name, cls in discover().items() if cls.__module__.startswith("strategies.")}
ENTRY = re.compile(r"@misc\{([a-z0-9.-]+),\n((?:  [a-z]+ = \{.*\},?\n)+)\}")


def read(text: str) -> dict[str, dict[str, str]]:
    """The entries by key; fails for malformed ones."""
    entries = re.split(r"\n\n", text.strip())
    found = [ENTRY.fullmatch(entry) for entry in entries]
    assert all(found), entries[found.index(None)] if None in found else ""
    return {entry[1]: dict(re.findall(r"  ([a-z]+) = \{(.*)\},?\n", entry[2])) for entry in found}


def named_in(fields: dict[str, str]) -> list[str]:
    return fields["note"].replace("\\_", "_").partition(": ")[2].split(", ")


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, str]]:
    return read(bibtex(CLASSES.values()))


def test_every_strategy_with_a_paper_is_in_exactly_one_entry(entries):
    named = [name for fields in entries.values() for name in named_in(fields)]
    assert sorted(named) == sorted(name for name, cls in CLASSES.items() if cls.paper != BASELINE)


def test_an_entry_has_exactly_what_its_strategies_cite(entries):
    for fields in entries.values():
        for cls in (CLASSES[name] for name in named_in(fields)):
            assert fields.keys() <= {"author", "year", "title", "eprint", "archiveprefix", "url", "note"}
            assert fields.get("eprint") == (cls.paper if ARXIV.fullmatch(cls.paper) else None)
            author = fields["author"].strip("{}").replace(" and others", " et al.")
            assert citation(cls).startswith(f"{author} {fields['year']}")


def test_every_paper_has_one_entry(entries):
    papers = [fields["eprint"] for fields in entries.values() if "eprint" in fields]
    assert len(papers) == len(set(papers)) > 80


def test_nearly_every_paper_has_its_title_and_no_title_is_left_over(entries):
    papers = {fields["eprint"]: fields.get("title") for fields in entries.values() if "eprint" in fields}
    assert titles().keys() <= papers.keys()
    assert len([title for title in papers.values() if title]) > 0.9 * len(papers)
    assert papers["1904.09751"] == "{The Curious Case of Neural Text Degeneration}"


def test_braces_balance_and_underscores_are_escaped():
    text = bibtex(CLASSES.values())
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0 and not re.search(r"(?<!\\)_", text)


@pytest.mark.parametrize("name, author", [("speculative", "Leviathan and others"), ("mbr", "Eikema and Aziz"),
                                          ("ead", "Simonds"), ("dry", "{p-e-w}")])
def test_names_are_written_as_bibtex_reads_them(name, author):
    (fields,) = read(bibtex([CLASSES[name]])).values()
    assert fields["author"] == author


def test_two_works_of_one_author_and_year_have_different_keys():
    assert len(read(bibtex([CLASSES["dry"], CLASSES["xtc"]]))) == 2


def test_the_command_prints_it_and_refuses_a_baseline(capsys):
    assert main(["list", "speculative", "--bibtex"]) == 0
    assert capsys.readouterr().out.startswith("@misc{leviathan2023-2211.17192,")
    assert main(["list", "greedy", "--bibtex"]) == 2
    assert "without a paper" in capsys.readouterr().err
