"""Programs that a model wrote, run in a process of their own: without imports, files, network or much time and memory.

Nobody calls this for a stranger unless the owner of a public page has said so: `Strategy.runs_programs` is how a
strategy tells that it does. Imports nothing but the standard library.
"""
from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

ALLOWED = "sum len sorted min max range abs enumerate list reversed any all int str zip map filter set dict".split()
SECONDS = 5
RUNNER = """
import ast, json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))            # seconds
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))  # bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))          # nothing can be opened beside the three streams
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))           # nor can another process be started
code, name, inputs, allowed = json.load(sys.stdin)
inner = ("gi_", "cr_", "ag_", "tb_", "f_", "format")        # from a generator's frame one could climb out of the space below
tree = ast.parse(code)
for node in ast.walk(tree):
    named = str(getattr(node, "attr", "")) + str(getattr(node, "id", ""))
    if isinstance(node, (ast.Import, ast.ImportFrom)) or "__" in named or named.startswith(inner):
        sys.exit("not allowed")
space = {"__builtins__": {a: __builtins__.__dict__[a] for a in allowed}}
exec(compile(tree, "answer", "exec"), space)
def tried(x):
    try:
        return json.dumps([space[name](x)])
    except Exception:
        return "null"
sys.stdout.write("[" + ",".join([tried(x) for x in inputs])[:100_000] + "]")    # whoever reads it has to hold it
"""


def tries(code: str, name: str, inputs: list) -> list[list | None]:
    """What a function of a program returns for each input, alone in a list; None where it fails, or the whole program
    does.
    """
    try:
        command = [sys.executable, "-I", "-S", "-c", RUNNER]
        request = json.dumps([code, name, inputs, ALLOWED])
        done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=SECONDS, env={})
        return json.loads(done.stdout) if done.returncode == 0 else [None] * len(inputs)
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return [None] * len(inputs)


def call(code: str, name: str, inputs: list) -> list[Any] | None:
    """The results for all inputs, or None if it fails for one."""
    found = tries(code, name, inputs)
    return [result[0] for result in found] if all(found) else None
