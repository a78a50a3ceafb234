"""What the kernel enforces on a program, each wall alone: the compiled filter of system calls, read instruction by
instruction by an interpreter of the kernel's rules, and the limits on resources.
"""
from __future__ import annotations

import mmap
import platform
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

seccomp = pytest.importorskip("pyseccomp", reason="only Linux has seccomp", exc_type=ImportError)
from playground.algorithms.programs import sandbox  # noqa: E402
from playground.algorithms.programs.confined import syscalls  # noqa: E402

pytestmark = pytest.mark.security
ROOT = Path(__file__).parents[1]
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the kernel numbers them
OTHERS = (0x40000003, 0xC000003E, 0xC00000B7, 0x40000028)  # 32-bit x86 among them
HERE = ARCHITECTURES.get(platform.machine())
X32 = 0x40000000  # added to the number of a call by programs with 32-bit pointers on x86-64
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBERS = range(1024)  # the kernel has fewer than 500


def decision(number: int, arguments: Sequence[int] = (0,) * 6, architecture: int | None = HERE) -> int:
    """What the filter decides of a call: the value of the return instruction that it reaches."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    program = list(struct.iter_unpack("<HBBI", syscalls.compiled()))
    place = accumulator = 0
    while True:
        code, if_true, if_false, k = program[place]
        place += 1
        if code == 0x20:  # load a word
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code == 0x54:
            accumulator &= k
        elif code == 0x05:
            place += k
        elif code in TESTS:
            place += if_true if TESTS[code](accumulator, k) else if_false
        elif code == 0x06:
            return k
        else:
            raise AssertionError(f"an instruction that this interpreter does not know: {code:#x}")


TESTS = {0x15: int.__eq__, 0x25: int.__gt__, 0x35: int.__ge__, 0x45: lambda a, k: bool(a & k)}


def named(names: Sequence[str]) -> set[int]:
    return {seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) for name in names} - {-1}


@pytest.fixture(autouse=True)
def known_machine():
    if HERE is None:
        pytest.skip(f"the numbers of system calls on {platform.machine()} are not known to this test")


def test_a_program_may_ask_for_memory_and_end_and_write_to_its_pipe_and_nothing_else():
    stdout = (1, 0, 0, 0, 0, 0)
    allowed = {number for number in NUMBERS if ALLOW in (decision(number), decision(number, stdout))}
    assert allowed == named(("brk", "munmap", "mremap", "madvise", "exit", "exit_group", "write"))


def test_calls_that_look_for_files_fail_and_all_others_end_the_process():
    refused = {number for number in NUMBERS if decision(number) & 0xFFFF0000 == ERRNO}
    assert refused == named(("open", "openat"))
    rest = {decision(number) for number in NUMBERS if number not in refused} - {ALLOW}
    assert rest == {KILL}


@pytest.mark.parametrize("descriptor", [0, 2, 3, 1000, 1 << 32 | 1])
def test_it_writes_to_its_pipe_alone(descriptor):
    (write,) = named(("write",))
    assert decision(write, (descriptor, 0, 0, 0, 0, 0)) == KILL


def test_it_maps_memory_without_a_file_that_it_cannot_execute():
    (call,) = named(("mmap",))
    anonymous, with_file, executable = mmap.MAP_ANONYMOUS, 0, mmap.PROT_EXEC
    assert decision(call, (0, 4096, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, 0, 0)) == ALLOW
    assert decision(call, (0, 4096, mmap.PROT_READ, with_file, 3, 0)) == KILL
    assert decision(call, (0, 4096, mmap.PROT_READ | executable, anonymous, 0, 0)) == KILL


@pytest.mark.parametrize("architecture", [other for other in OTHERS if other != HERE])
def test_calls_of_another_architecture_end_the_process(architecture):
    assert {decision(number, architecture=architecture) for number in NUMBERS} == {KILL}


def test_calls_with_32_bit_pointers_end_the_process():
    assert {decision(X32 | number) for number in NUMBERS} == {KILL}


# --- each wall alone, against calls of 32-bit programs and io_uring ---

WALLED = """
import os, sys
sys.path.insert(0, "tests")
from support import confined_attacks as attacks
from playground.algorithms.programs.confined import kernel, syscalls
wall, secret, names = sys.argv[1], sys.argv[2], sys.argv[3:]
attacks.warm()
allowed = syscalls.compiled()
for name in names:
    if not (fork := os.fork()):
        try:
            {"none": lambda: None, "limits": kernel.limit_resources, "filter": lambda: kernel.install(allowed)}[wall]()
            os._exit(0 if attacks._succeeds(name, secret, os.getppid(), 1) else 1)
        except OSError:
            os._exit(2)
    if os.waitpid(fork, 0)[1] == 0:
        print(name)
"""
OF_32_BITS = ["open_by_32_bits", "x32_open", "x32_socket", "io_uring_setup", "x32_io_uring_setup", "memfd_create"]


def reached(wall: str, secret: str, *names: str) -> list[str]:
    """The calls that succeed behind one wall."""
    command = [sys.executable, "-c", WALLED, wall, secret, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code and the numbers are of x86-64")
def test_neither_wall_lets_calls_of_32_bit_programs_or_io_uring_through(tmp_path):
    (tmp_path / "secret").write_text("swordfish")
    secret = str(tmp_path / "secret")
    assert "memfd_create" in reached("none", secret, *OF_32_BITS)  # the calls are made as a process can make them
    assert reached("limits", secret, *OF_32_BITS) == []
    assert reached("filter", secret, *OF_32_BITS, "call_of_32_bits", "x32_fork", "x32_kill_the_page") == []


# --- resources ---

LIMITS = {"CPU": 1, "AS": 1 << 28, "FSIZE": 0, "NOFILE": 0, "NPROC": 0, "CORE": 0}  # seconds, bytes, numbers
READ = """
import resource, signal
from playground.algorithms.programs.confined import kernel
kernel.limit_resources()
print([resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in {names}])
print(signal.getitimer(signal.ITIMER_REAL)[0], signal.getsignal(signal.SIGALRM) == signal.SIG_DFL)
"""


def test_a_program_has_a_second_a_quarter_of_a_gigabyte_and_no_files_or_processes():
    command = [sys.executable, "-c", READ.format(names=list(LIMITS))]
    limits, alarm = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert limits == str([(most, most) for most in LIMITS.values()])
    seconds, ends_the_process = alarm.split()
    assert 4 < float(seconds) <= 5 and ends_the_process == "True"


def test_a_program_cannot_use_half_a_gigabyte():
    assert sandbox.tries("def work(x):\n    return len('a' * (1 << x))", "work", [20, 29]) == [[1 << 20], None]
