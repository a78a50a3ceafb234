"""Thirty faults, planted one at a time in a copy of the project, and whether `tests/run` catches each.

    python tools/planted_faults.py                 # all of them, an hour on two quiet cores
    python tools/planted_faults.py swapped         # those with this word in their name or place

Whether a test runs does not depend on what else is collected, so each fault is met with the default selection of the
test files that are about its place; a fault that they let through is one that `tests/run` lets through, unless a file
catches it that nobody would look into. `tests/test_planted_faults.py` shows that every fault still has its place.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS_THAT_FAIL = 1  # pytest's exit code; any other but 0 is no verdict
SECONDS = 900  # until a run is given up
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "runs", "build")


@dataclass(frozen=True)
class Fault:
    """`before`, which stands once in the file `place`, becomes `after`; `tests` are the files about that place."""

    name: str
    place: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        return next(area for area, faults in FAULTS.items() if self in faults)


def _faults(*rows: tuple[str, str, str, str, str]) -> tuple[Fault, ...]:
    return tuple(Fault(name, place, before, after, tuple(tests.split())) for name, place, before, after, tests in rows)


SANDBOX = "playground/algorithms/programs/confined"
FAULTS = {
    "the page's scripts": _faults(
        ("every team is scored with the first team's picks", "assets/scripts/game/rules.js",
         "bits: this.played.map(({ picks }) => bitsOf(picks[i].p))",
         "bits: this.played.map(({ picks }) => bitsOf(picks[0].p))", "test_script_logic"),
        ("swapped probabilities where two lanes part", "assets/scripts/views/difference.js",
         "shareCell(pair, of, pair.probability(of, side), pair.sayProbability(of, side))",
         "shareCell(pair, of, pair.probability(1 - of, side), pair.sayProbability(1 - of, side))",
         "test_live_difference"),
        ("the button for CSV saves a trace", "assets/scripts/player/main.js",
         'csv: () => saveRun(this.trace, "csv")', 'csv: () => saveRun(this.trace, "trace")', "test_live_exports"),
        ("a lane without forced tokens is called a fork", "assets/scripts/run/headers.js",
         "if (!header.forced.length ||", "if (header.forced.length ||", "test_live_numbers test_live_view"),
        ("accepted draft tokens are called resampled", "assets/scripts/lane/colour.js",
         'const base = "t o-" + (token.origin in ORIGINS ? token.origin : "sampled")',
         'const base = "t o-" + (token.origin === "draft" ? "redraw" : token.origin)', "test_live_view"),
        ("one step back goes to the start", "assets/scripts/player/player.js",
         "while (place > 0 && !this.order[place - 1].stop) place -= 1;", "place = 0;",
         "test_live_frames test_live_view"),
    ),
    "the sandbox and limits": _faults(
        ("programs may open sockets", f"{SANDBOX}/syscalls.py",
         "for name in (*MEMORY, *ENDING):", 'for name in (*MEMORY, *ENDING, "socket", "connect", "sendto"):',
         "test_sandbox_kernel"),
        ("programs may use any amount of memory", f"{SANDBOX}/kernel.py",
         "(resource.RLIMIT_AS, MEMORY_BYTES)", "(resource.RLIMIT_AS, MEMORY_BYTES << 8)", "test_sandbox_kernel"),
        ("programs may read any attribute", f"{SANDBOX}/policy.py",
         "node.attr not in METHODS or", "False or", "test_sandbox"),
        ("programs may write files", f"{SANDBOX}/kernel.py",
         "(resource.RLIMIT_FSIZE, 0)", "(resource.RLIMIT_FSIZE, 1 << 20)", "test_sandbox_kernel"),
        ("a text may be of any length", "playground/request_limits.py",
         "if most is not None and len(text) > most:", "if most is not None and len(text) > most << 20:",
         "test_request_limits"),
        ("a schema may be nested to any depth", "playground/grammar/limits.py",
         "SCHEMA_DEPTH = 100 ", "SCHEMA_DEPTH = 100_000 ", "test_grammar_limits test_schemas"),
    ),
    "verifiers and samplers": _faults(
        ("rejection accepts with q/p", "playground/algorithms/speculative/verification.py",
         "flip(min(1.0, chance / offered) if offered else 1.0)",
         "flip(min(1.0, offered / chance) if chance else 1.0)", "test_guarantees"),
        ("the residual is not clamped", "playground/engine/sampling.py",
         "residual = (p - q).clamp(min=0)", "residual = (p - q).abs()", "test_sampling test_guarantees"),
        ("earlier siblings stay in q", "playground/algorithms/speculative/verification.py",
         'if tree.drawn != "without_replacement" or not taken:', "if True:", "test_strategies_trees test_guarantees"),
        ("top-p leaves out the token that reaches p", "playground/engine/sampling.py",
         "out = ordered.softmax(-1).cumsum(-1) <= 1 - p", "out = ordered.softmax(-1).cumsum(-1) < 1.0001 - p / 1.01",
         "test_strategies_top_p test_sampling"),
        ("block verification forgets the worth so far", "strategies/speculative/block_verification.py",
         "found.append(min(1.0, found[-1] * float(p[token]) / float(q[token])))",
         "found.append(min(1.0, float(p[token]) / float(q[token])))", "test_guarantees"),
        ("XTC spares the most likely token", "strategies/sampling/xtc.py",
         "spared = p.masked_fill(~likely, 2.0).argmin(-1, keepdim=True)", "spared = p.argmax(-1, keepdim=True)",
         "test_strategies_xtc"),
    ),
    "cache and grammar": _faults(
        ("H2O evicts the heavy hitters", "playground/algorithms/kv_cache/heavy_hitters.py",
         "return self.attention.of(held.layer,", "return -self.attention.of(held.layer,", "test_strategies_h2o"),
        ("a window is one token wider than its budget", "strategies/kv_cache/sink_window.py",
         "(query_positions - key_positions < self.window)", "(query_positions - key_positions <= self.window)",
         "test_guarantees test_strategies_sink_window"),
        ("SnapKV pools nothing", "playground/algorithms/kv_cache/prompt_compression.py",
         "return POOLS[self.pooling](scores, self.kernel, 1, self.kernel // 2)", "return scores",
         "test_strategies_pyramidkv test_strategies_snapkv"),
        ("KIVI rounds codes down", "playground/algorithms/kv_cache/quantization.py",
         "codes = steps.round().clamp(0, levels)", "codes = steps.floor().clamp(0, levels)",
         "test_strategies_gear test_strategies_kivi"),
        ("a text may end anywhere in its grammar", "playground/grammar/matcher.py",
         "allowed[self._engine.end_index] = self.accepting", "allowed[self._engine.end_index] = True",
         "test_grammar test_strategies_constrained"),
        ("masks of a tree stay a token ahead", "playground/grammar/matcher.py",
         "                self._visit(child, tokens, children, masks, deadline)\n                self.rollback(1)",
         "                self._visit(child, tokens, children, masks, deadline)", "test_grammar"),
    ),
    "HTTP": _faults(
        ("any host name is answered to", "playground/ui/guard/request_guard.py",
         "if asked and not any(self.answers_to(name) for name, _ in asked):", "if False:", "test_http_limits"),
        ("other sites may change things", "playground/ui/guard/request_guard.py",
         "if changing and origin is not None and not self._is_own(origin, asked):", "if False:", "test_http_limits"),
        ("Gradio's developer routes are open", "playground/ui/guard/request_guard.py",
         "if SHUT.match(_path(scope)):", "if SHUT.fullmatch(_path(scope)):", "test_http_limits"),
        ("a body is counted after it was read", "playground/ui/guard/request_guard.py",
         "        if size > most:\n            raise _too_large(most)\n", "", "test_http_limits"),
        ("responses with cookies are kept for others", "playground/ui/guard/response_cache.py",
         '"set-cookie"', '"set-cookies"', "test_response_cache"),
        ("the sessions of all visitors are swept at once", "playground/ui/guard/sessions.py",
         "if session not in live and self._is_due(session)", "if self._is_due(session)",
         "test_serving"),
    ),
}


def planted(fault: Fault, folder: Path) -> Path:
    """A copy of the project in `folder` with the fault; raises ValueError where its place has changed."""
    copy = folder / "project"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    file = copy / fault.place
    text = file.read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.place} has no single {fault.before!r}")
    file.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    return copy


def first_failure(fault: Fault) -> str:
    """The first test that fails with the fault; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = planted(fault, Path(folder))
        tests = [f"tests/{name}.py" for name in fault.tests]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--tier", "default", "--part", "0", *tests]
        ran = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=SECONDS,
                             env={**os.environ, "PYTHONPATH": ""})
        failures = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if ran.returncode not in (0, TESTS_THAT_FAIL):
            raise RuntimeError(ran.stdout[-2000:] + ran.stderr[-2000:])
        return failures[0] if failures else ""


def main(word: str = "") -> int:
    chosen = [fault for faults in FAULTS.values() for fault in faults if word in f"{fault.name} {fault.place}"]
    missed = 0
    for fault in chosen:
        started = time.monotonic()
        failure = first_failure(fault)
        missed += not failure
        verdict = f"caught by {failure.removeprefix('tests/')}" if failure else "NOT CAUGHT"
        print(f"{fault.area}: {fault.name}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
