"""Run one program in this process: a script that `playground.algorithms.programs.sandbox` starts.

The request on standard input is {"filter", "code", "name", "inputs"}. The answer on standard output is a list with
[result] or null for each input. Exit code UNCONFINED: the kernel could not confine the process, and nothing was run.
"""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kernel  # noqa: E402
import policy  # noqa: E402

UNCONFINED = 77
RESULT_CHARACTERS = 20_000


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    sys.stdin = sys.stderr = None
    try:
        kernel.confine(bytes.fromhex(request["filter"]))
    except (OSError, ValueError):
        os._exit(UNCONFINED)
    answer(run(request["code"], request["name"], request["inputs"]))
    os._exit(0)


def run(code: str, name: str, inputs: list) -> str:
    """Results for all inputs, as JSON; an empty string if the program is not allowed or does not compile."""
    space = policy.namespace()
    try:
        exec(compile(policy.read(code), "program", "exec"), space)
        return f"[{','.join(result(space[name], given) for given in inputs)}]"
    except Exception:
        return ""


def result(function, given) -> str:
    try:
        text = json.dumps([function(given)])
        return text if len(text) <= RESULT_CHARACTERS else "null"
    except Exception:
        return "null"


def answer(text: str) -> None:
    rest = text.encode()
    while rest:
        rest = rest[os.write(kernel.RESULTS, rest):]


if __name__ == "__main__":
    main()
