"""What a task of a confined child tries to reach, as the work of a child; each says "reached" if it succeeds."""
from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from playground.confined.task_bounds import TaskBounds

BOUNDS = TaskBounds(cpu_seconds=1.0, wall_seconds=2.0, memory_bytes=64 << 20, answer_bytes=1 << 20, lessons=2)
REACHED, KEPT = "reached", "kept out"
X32 = 0x40000000  # added to the number of a call by programs with 32-bit pointers
# by name, the number on x86-64 and arguments; each succeeds for an ordinary process of a user or of root
SYSCALLS = {
    "io_uring_setup": (425, 8, bytes(120)),
    "memfd_create": (319, b"memory", 0),
    "socket_of_packets": (41, 16, 3, 0),
    "pidfd_open": (434, "page", 0),
    "process_vm_readv": (310, "page", 0, 0, 0, 0, 0),
    "ptrace_seize": (101, 0x4206, "page", 0, 0),
    "tkill_the_page": (200, "page", 0),
    "signal_the_page": (62, "page", 0),
    "signal_the_child": (62, "child", 0),
    "clone": (56, 0x11, 0, 0, 0, 0),
    "vfork_by_clone3": (435, bytes(88), 88),
    "unshare": (272, 0x10000000),
    "set_no_timer": (38, 0, bytes(32), 0),
    "block_the_alarm": (14, 0, b"\x00\x20\x00\x00\x04\x00\x00\x00", 0, 8),
    "ignore_the_alarm": (13, 14, b"\x01" + bytes(31), 0, 8),
    "raise_its_limits": (302, 0, 7, b"\x10" + bytes(7) + b"\x10" + bytes(7), 0),
    "executable_memory": (9, 0, 4096, 7, 0x22, -1, 0),
    "file_owner": (72, 0, 8, "page"),
    "shared_memory": (29, 4242, 4096, 0o1666),
    "message_queue": (240, b"queue", 0o100, 0o600, 0),
    "semaphore": (64, 4242, 1, 0o1666),
    "key_ring": (250, 0, -3, 1),
    "inotify": (294, 0),
    "epoll": (291, 0),
    "event_descriptor": (290, 0, 0),
    "timer_descriptor": (283, 0, 0),
    "duplicate": (32, 0),
    "change_folder": (80, b"/"),
    "working_folder": (79, bytes(256), 256),
    "make_folder": (83, b"/tmp/made-by-a-task", 0o700),
    "system_name": (63, bytes(400)),
    "system_facts": (99, bytes(128)),
    "scheduler": (204, 0, 8, bytes(8)),
    "priority": (140, 0, 0),
    "landlock": (444, 0, 0, 1),
    "user_faults": (323, 0),
    "bpf": (321, 0, bytes(72), 72),
    "performance_counters": (298, bytes(112), 0, -1, -1, 0),
    "io_uring_register": (427, -1, 0, 0, 0),
    "x32_open": (X32 | 2, b"/etc/passwd\0", 0),
    "x32_socket": (X32 | 41, 2, 1, 0),
    "x32_fork": (X32 | 57,),
    "x32_kill_the_page": (X32 | 62, "page", 0),
    "x32_io_uring_setup": (X32 | 425, 8, bytes(120)),
}
# mov eax, 20; int 0x80; ret: getpid as 32-bit programs call it
GETPID_32 = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"
PLACE_OF_PATH = 64
# push rbx; mov eax, 5; mov ebx, the path; xor ecx, ecx; xor edx, edx; int 0x80; pop rbx; ret: open
OPEN_32 = b"\x53\xb8\x05\x00\x00\x00\xbb%b\x31\xc9\x31\xd2\xcd\x80\x5b\xc3"
MAP_32BIT = 0x40  # linux/mman.h: below 2 GiB, where a 32-bit call finds it
code: list[mmap.mmap] = []


def warm() -> None:
    """Executable memory with a call of 32-bit programs, which a task could not make itself."""
    if platform.machine() == "x86_64":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_32BIT
        code.append(mmap.mmap(-1, 4096, flags, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))


def learn(lesson: str) -> str:
    return lesson


def answer(order: list, learned: str | None):
    name, *arguments = order
    if name in ORDINARY:
        return ORDINARY[name](learned, *arguments)
    try:
        return REACHED if _succeeds(name, *arguments) else KEPT
    except OSError as reason:
        return f"{KEPT}: {reason.strerror}"


def _succeeds(name: str, secret: str, page: int, child: int) -> bool:
    if name in PYTHON:
        PYTHON[name](secret)
        return True
    number, *given = SYSCALLS[name]
    pids = {"page": page, "child": child}
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    words = [ctypes.c_long(pids.get(each, each)) if not isinstance(each, bytes)
             else ctypes.create_string_buffer(each, len(each)) for each in given]
    return call(ctypes.c_long(number), *words) != -1


def _fork(secret: str) -> None:
    if os.fork() == 0:
        os._exit(0)


def _start_thread(secret: str) -> None:
    try:
        threading.Thread(target=lambda: None).start()
    except RuntimeError:
        raise OSError(1, "no thread") from None


def _call_32_bits(secret: str) -> None:
    _run(GETPID_32)


def _open_by_32_bits(secret: str) -> None:
    path = (_place() + PLACE_OF_PATH).to_bytes(4, "little")
    _run((OPEN_32 % path).ljust(PLACE_OF_PATH, b"\0") + os.fsencode(secret) + b"\0")


def _place() -> int:
    if not code:
        raise OSError(1, "another processor")
    return ctypes.addressof(ctypes.c_char.from_buffer(code[0]))


def _run(machine_code: bytes) -> None:
    place = _place()
    code[0].seek(0)
    code[0].write(machine_code)
    if ctypes.CFUNCTYPE(ctypes.c_int)(place)() < 0:
        raise OSError(1, "no such call")


def _listed(secret: str) -> None:
    os.listdir(os.path.dirname(secret))


def _connect(secret: str) -> None:
    with socket.socket() as line:
        line.connect(("127.0.0.1", 9))


PYTHON: dict[str, Callable[[str], object]] = {
    "read_file": lambda secret: Path(secret).read_text(),
    "write_file": lambda secret: Path(secret).write_text("changed"),
    "append_to_file": lambda secret: Path(secret).open("a"),
    "truncate_file": lambda secret: os.truncate(secret, 1),
    "delete_file": os.unlink,
    "rename_file": lambda secret: os.rename(secret, secret + ".moved"),
    "link_to_file": lambda secret: os.symlink(secret, secret + ".link"),
    "hard_link": lambda secret: os.link(secret, secret + ".link"),
    "change_mode": lambda secret: os.chmod(secret, 0o777),
    "change_times": lambda secret: os.utime(secret),
    "list_folder": _listed,
    "is_there_a_file": os.stat,
    "may_a_file_be_read": lambda secret: os.close(os.open(secret, os.O_PATH)),
    "read_environment": lambda secret: Path("/proc/self/environ").read_bytes(),
    "read_memory_map": lambda secret: Path("/proc/self/maps").read_bytes(),
    "write_to_the_null_device": lambda secret: Path(os.devnull).write_text("x"),
    "connect": _connect,
    "datagram": lambda secret: socket.socket(type=socket.SOCK_DGRAM),
    "unix_socket": lambda secret: socket.socket(socket.AF_UNIX),
    "socket_pair": lambda secret: socket.socketpair(),
    "open_pipe": lambda secret: os.pipe(),
    "fork": _fork,
    "exec": lambda secret: os.execv("/bin/true", ["true"]),
    "thread": _start_thread,
    "limits_back": lambda secret: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "timers_off": lambda secret: signal.setitimer(signal.ITIMER_REAL, 0),
    "signal_handler": lambda secret: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "call_of_32_bits": _call_32_bits,
    "open_by_32_bits": _open_by_32_bits,
    "new_root": lambda secret: os.chroot("/"),
    "other_user": lambda secret: os.setuid(65534),
}
ATTACKS = [*PYTHON, *(SYSCALLS if platform.machine() == "x86_64" else ())]


def _loop(learned) -> None:
    while True:
        pass


def _hoard(learned) -> str:
    return "x" * (1 << 30)


def _recurse(learned) -> list:
    sys.setrecursionlimit(1 << 30)
    return list(map(_recurse, [learned]))  # through C, whose stack it fills


def _busy(seconds: float) -> None:
    end = monotonic() + seconds
    while monotonic() < end:
        pass


def _asleep(learned) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


ORDINARY: dict[str, Callable] = {
    "echo": lambda learned, value: value,
    "echo_later": lambda learned, value: _busy(0.5) or value,
    "environment": lambda learned: dict(os.environ),
    "lesson_length": lambda learned: len(learned),
    "loop": _loop,
    "sleep": _asleep,
    "hoard": _hoard,
    "recurse": _recurse,
    "flood": lambda learned: "x" * (2 << 20),
}

