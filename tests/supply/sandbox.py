"""Run a program under what the systemd unit forbids, where there is no systemd: its system calls, its sockets, its
memory.

    python sandbox.py UNIT PROGRAM ARGUMENT ...

SystemCallFilter, RestrictAddressFamilies, MemoryDenyWriteExecute of UNIT
    -> one seccomp program, as systemd makes them -> exec PROGRAM
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final

HEADER: Final = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")  # the numbers of the system calls
FAMILIES: Final = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10, "AF_NETLINK": 16}
ARCHITECTURE: Final = 0xC000003E  # x86-64
LOAD, EQUAL, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x45, 0x54, 0x06  # of classic BPF
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000  # of seccomp
NUMBER, ARCH, ARGUMENT_0, ARGUMENT_2 = 0, 4, 16, 32  # where they are in what a filter sees
PROT_WRITE, PROT_EXEC = 2, 4
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2


def settings(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


def members(group: str) -> set[str]:
    """The system calls of a group, as this machine's systemd has them."""
    if not group.startswith("@"):
        return {group}
    said = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True
    ).stdout
    words = {line.strip() for line in said.splitlines()[1:] if line.strip() and not line.strip().startswith("#")}
    return set().union(*(members(word) for word in words - {group}))


def allowed(unit: Path) -> set[str]:
    found: set[str] = set()
    for line in settings(unit, "SystemCallFilter"):
        named = set().union(*(members(group) for group in line.removeprefix("~").split()))
        found = found - named if line.startswith("~") else found | named
    return found


def program(unit: Path) -> bytes:
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", HEADER.read_text())}
    families = [FAMILIES[name] for name in settings(unit, "RestrictAddressFamilies")[0].split()]
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, ARCHITECTURE),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]

    def only(call: str, body: list[tuple[int, int, int, int]]) -> None:
        """`body` for that call, which it must answer, or fall through to what loads the number again."""
        code.append((EQUAL, 0, len(body) + 1, numbers[call]))
        code.extend([*body, (LOAD, 0, 0, NUMBER)])

    known = [part for family in families for part in ((EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW))]
    only("socket", [(LOAD, 0, 0, ARGUMENT_0), *known, refuse(errno.EAFNOSUPPORT)])
    if settings(unit, "MemoryDenyWriteExecute") == ["yes"]:
        both = PROT_WRITE | PROT_EXEC
        only("mmap", [(LOAD, 0, 0, ARGUMENT_2), (AND, 0, 0, both), (EQUAL, 0, 1, both), refuse(errno.EPERM)])
        only("mprotect", [(LOAD, 0, 0, ARGUMENT_2), (ANY_BIT, 0, 1, PROT_EXEC), refuse(errno.EPERM)])
    for name in sorted(allowed(unit) & set(numbers)):
        code += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, ALLOW)]
    code.append(refuse(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *one) for one in code)


def refuse(number: int) -> tuple[int, int, int, int]:
    return (RETURN, 0, 0, ERRNO | number)


def main() -> None:
    code = program(Path(sys.argv[1]))
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_of = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, FILTER, ctypes.c_char_p(filter_of), 0, 0)):
        if libc.prctl(*call) != 0:
            sys.exit(f"prctl{call[:2]}: {os.strerror(ctypes.get_errno())}")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
