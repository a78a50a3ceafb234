"""The colours of the live view, read from its style sheets: text is legible on each of them, and kinds
differ.

Contrast is the ratio of relative luminances that WCAG 2 defines. Deuteranopia is simulated with the matrix of Machado,
Oliveira and Fernandes (2009, severity 1), in linear light; differences of two colours are distances in CIE L*a*b*
(1976).
"""
from __future__ import annotations

import re
from itertools import combinations
from math import dist, hypot
from pathlib import Path

import pytest

ASSETS = Path(__file__).parents[1] / "assets"
SHEETS = ("palette.css", "live/live.css")
READABLE = 4.5
APART = 15  # distance of two kinds next to each other in one picture
STEP = 2  # distance of two neighbouring levels of a scale, so that their order can be seen
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)

LEVELS = [f"--h{level}" for level in range(1, 11)]
GROUNDS = {
    "--pg-ink": ["--pg-card", "--pg-sunk", "--accent-soft", "--trouble-soft", "--evicted"],
    "--accent": ["--pg-card", "--accent-soft"],
    "--trouble": ["--pg-card", "--trouble-soft"],
    "--on-heat": LEVELS,
}
KINDS = {"lanes": [f"--pg-lane-{i}" for i in range(4)],
         "workers": ["--by-target", "--by-draft", "--by-beside", "--by-grammar", "--by-rest"],
         "slots of a cache": ["--live", "--evicted", "--scratch"],
         "full lines of a figure": ["--series-0", "--series-1"],  # the others are dashed or dotted
         "dashed lines of a figure": ["--series-2", "--series-3"],
         "marks over a chart": ["--pg-ink", "--by-grammar", "--by-beside", "--by-draft"]}
HUES = {"lanes": KINDS["lanes"], "entropy": [f"--b{level}" for level in range(1, 8)] + LEVELS, "trouble": ["--trouble"]}

modes = pytest.mark.parametrize("mode", ["light", "dark"])


# --- colours as the browser has them ---

def colours(mode: str) -> dict[str, tuple[float, ...]]:
    """Every custom property that is a plain colour, as shares of red, green and blue."""
    found: dict[str, str] = {}
    for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", "".join((ASSETS / name).read_text() for name in SHEETS)):
        if mode == "dark" or ".dark" not in selector:
            found |= re.findall(r"(--[\w-]+):\s*(#[0-9a-f]{6})\s*;", body)
    return {name: tuple(int(value[i:i + 2], 16) / 255 for i in (1, 3, 5)) for name, value in found.items()}


def linear(colour: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in colour)


def times(matrix: tuple[tuple[float, ...], ...], vector: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sum(a * b for a, b in zip(row, vector)) for row in matrix)


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    low, high = sorted(times(TO_XYZ, linear(colour))[1] for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def lab(light: tuple[float, ...]) -> tuple[float, float, float]:
    """L*, a* and b* of linear light."""
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (part / white for part, white in zip(times(TO_XYZ, light), WHITE))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(a: tuple[float, ...], b: tuple[float, ...], seen=lambda light: light) -> float:
    return dist(*(lab(seen(linear(colour))) for colour in (a, b)))


def without_green(light: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(min(1.0, max(0.0, share)) for share in times(DEUTERANOPIA, light))


# --- legibility and distinction ---

def test_the_measures_give_known_values():
    black, white, grey = (0.0,) * 3, (1.0,) * 3, (119 / 255,) * 3
    assert contrast(black, white) == pytest.approx(21)
    assert contrast(grey, white) == pytest.approx(4.48, abs=0.01)
    assert lab(linear((1.0, 0.0, 0.0))) == pytest.approx((53.24, 80.09, 67.20), abs=0.05)
    assert distance((0.8, 0.3, 0.2), (0.35, 0.5, 0.2), without_green) < distance((0.8, 0.3, 0.2), (0.35, 0.5, 0.2)) / 3


@modes
def test_muted_text_is_legible_on_the_page_background(mode):
    known = colours(mode)
    for share, ground in ((0.66, "--pg-card"), (0.66, "--pg-sunk")):
        quiet = tuple(share * ink + (1 - share) * paper for ink, paper in zip(known["--pg-ink"], known["--pg-card"]))
        assert contrast(quiet, known[ground]) >= READABLE, ground


@modes
@pytest.mark.parametrize("text", GROUNDS)
def test_text_is_legible_on_every_background(mode, text):
    known = colours(mode)
    poor = {
        ground: round(contrast(known[text], known[ground]), 2)
        for ground in GROUNDS[text]
        if contrast(known[text], known[ground]) < READABLE
    }
    assert not poor


@modes
def test_the_number_of_a_lane_is_legible_on_its_colour(mode):
    known = colours(mode)
    poor = {
        name: round(contrast(known[name], known["--pg-card"]), 2)
        for name in KINDS["lanes"]
        if contrast(known[name], known["--pg-card"]) < READABLE
    }
    assert not poor


@modes
@pytest.mark.parametrize("group", KINDS)
@pytest.mark.parametrize(
    "seen", [lambda light: light, without_green], ids=["with all pigments", "without that for green"]
)
def test_kinds_in_one_picture_can_be_distinguished(mode, group, seen):
    known = colours(mode)
    alike = {f"{a} {b}": round(distance(known[a], known[b], seen), 1) for a, b in combinations(KINDS[group], 2)
             if distance(known[a], known[b], seen) < APART}
    assert not alike


@modes
def test_levels_of_the_scale_keep_their_order_without_any_sense_of_hue(mode):
    known = colours(mode)
    lightness = [lab(linear(known[level]))[0] for level in LEVELS]
    steps = [after - before for before, after in zip(lightness, lightness[1:])]
    assert all(step > STEP for step in steps) if mode == "dark" else all(step < -STEP for step in steps)


@modes
def test_a_hue_means_a_lane_entropy_or_trouble_and_nothing_else(mode):
    """Colours of the data: chroma is the distance from grey in CIE L*a*b*."""
    known = colours(mode)
    data = {*re.findall(r"(--[\w-]+): #", (ASSETS / "live/live.css").read_text()), *KINDS["lanes"]}
    coloured = {name for name in data if hypot(*lab(linear(known[name]))[1:]) > 12}
    meant = {name for names in HUES.values() for name in names}
    assert coloured <= {*meant, "--trouble-soft"}
    assert {*KINDS["lanes"], "--h10", "--b7", "--trouble"} <= coloured, "they are no greys themselves"


@modes
def test_lines_of_the_timeline_grow_from_grey_to_the_strongest_colour(mode):
    known = colours(mode)
    chroma = [hypot(*lab(linear(known[f"--b{level}"]))[1:]) for level in range(8)]
    assert chroma[0] < 12 and chroma == sorted(chroma) and chroma[-1] > 40
