"""Isolate the programs that a model wrote: no network, no writable file, no readable file but
Python's own, no other process.

There are two kinds of isolation. Landlock (Linux 5.13 or later) restricts the files that a process
can open. Bubblewrap starts a process in namespaces that show only some files. With both kinds, a
seccomp filter refuses the system calls by which a program could reach beyond its own process.

Standard library only, because runner processes load nothing else. A step that fails raises OSError;
there is no weaker fallback.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

LANDLOCK = "landlock"
BUBBLEWRAP = "bubblewrap"
NONE = "none"
ISOLATIONS = (LANDLOCK, BUBBLEWRAP)
"""Kinds of isolation. `sandbox=auto` uses the first that the machine has."""

PACKAGE = str(Path(__file__).resolve().parents[2])
"""Folder of moe_lab. Programs cannot read it, although its parent may be readable, as it has the
answers to the shipped benchmarks."""
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store")
_NULL_DEVICE = "/dev/null"
_SYSTEM_FILES = ("/etc/ld.so.cache", _NULL_DEVICE, "/dev/zero", "/dev/urandom", "/dev/random")

# arguments of prctl(2)
_PARENT_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_SET_SECCOMP = 22
_NO_NEW_PRIVILEGES = 38
# Landlock's system calls, which have the same numbers on all machines, and its access rights
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8

_ABIS = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
"""Machine -> (number of its ABI in the kernel, its column in the tables of system calls)."""
_NEWER_CALLS = 452
"""Calls with this number or a higher one are newer than the tables. For programs they do not exist,
as on an older kernel. This includes the calls of x32, a second ABI of x86_64."""
_REFUSED_CALLS = """
# name  x86_64  aarch64 (-: the machine does not have the call)  error, if not EPERM

# Start a process. `_LIMITED_CALLS` allows threads.
fork 57 -
vfork 58 -
execve 59 221
execveat 322 281
unshare 272 97
setns 308 268

# Signal, watch or change another process.
kill 62 129
tkill 200 130
tgkill 234 131
rt_sigqueueinfo 129 138
rt_tgsigqueueinfo 297 240
pidfd_open 434 434
pidfd_send_signal 424 424
pidfd_getfd 438 438
ptrace 101 117
process_vm_readv 310 270
process_vm_writev 311 271
process_madvise 440 440
process_mrelease 448 448
kcmp 312 272
move_pages 279 239
migrate_pages 256 238
sched_setaffinity 203 122
sched_setscheduler 144 119
sched_setparam 142 118
sched_setattr 314 274
setpriority 141 140
ioprio_set 251 30

# Take memory that is not limited, or that outlives the process.
shmget 29 194
shmat 30 196
shmctl 31 195
semget 64 190
semop 65 193
semctl 66 191
semtimedop 220 192
msgget 68 186
msgsnd 69 189
msgrcv 70 188
msgctl 71 187
mq_open 240 180
mq_unlink 241 181
add_key 248 217
request_key 249 218
keyctl 250 219
memfd_create 319 279
memfd_secret 447 447
vmsplice 278 75
splice 275 76
tee 276 77
io_setup 206 0
landlock_create_ruleset 444 444

# Change or watch a file without opening it for writing.
truncate 76 45
chmod 90 -
fchmod 91 52
fchmodat 268 53
chown 92 -
fchown 93 55
lchown 94 -
fchownat 260 54
utime 132 -
utimes 235 -
futimesat 261 -
utimensat 280 88
setxattr 188 5
lsetxattr 189 6
fsetxattr 190 7
removexattr 197 14
lremovexattr 198 15
fremovexattr 199 16
inotify_init 253 -
inotify_init1 294 26
fanotify_init 300 262
sync 162 81
syncfs 306 267

# Reach another socket.
connect 42 203
bind 49 200
sendmsg 46 211
sendmmsg 307 269

# Change the user.
setuid 105 146
setgid 106 144
setreuid 113 145
setregid 114 143
setgroups 116 159
setresuid 117 147
setresgid 119 149
setfsuid 122 151
setfsgid 123 152

# Bypass this filter, or reach parts of the kernel that had vulnerabilities and no answer needs.
io_uring_setup 425 425
bpf 321 280
perf_event_open 298 241
userfaultfd 323 282
syslog 103 116

# Calls without which the C library and programs know what to do.
clone3 435 435 ENOSYS  # threads are then started by clone
socket 41 198 EAFNOSUPPORT
"""
"""System calls that fail."""
_LIMITED_CALLS = """
# name  x86_64  aarch64  position of an argument  condition  values

clone 56 220 0 has 0x10000                             # CLONE_THREAD
socketpair 53 199 0 in 1                               # local sockets, for event loops
socketpair 53 199 1 in 1,0x801,0x80001,0x80801         # streams, which cannot be reconnected
prlimit64 302 261 0 in 0                               # this process
prctl 157 167 0 not-in 1                               # a program must die with its runner
fcntl 72 25 1 not-in 8,10,15,1024,1026                 # signals to others, leases
ioctl 16 29 1 in 0x5401,0x5413,0x541b,0x5421,0x5450,0x5451  # not the flags of a file
"""
"""System calls that fail with EPERM unless an argument fulfils the condition."""

_libc = ctypes.CDLL(None, use_errno=True)


@lru_cache
def missing(isolation: str) -> str | None:
    """The reason why this machine does not have a kind of isolation; None if it has it."""
    if isolation == NONE:
        return None
    if sys.platform != "linux":
        return f"{sys.platform} does not have {isolation}"
    machine = os.uname().machine
    if machine not in _ABIS:
        return f"the system calls of {machine} are not known"
    if isolation == LANDLOCK and landlock_version() == 0:
        return "the kernel does not have Landlock (Linux 5.13 or later)"
    if isolation == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "the program bwrap (bubblewrap) is not installed"
    return None


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 if the kernel does not have it, or does not allow
    it."""
    get_version = ctypes.c_long(1)
    return max(0, int(_libc.syscall(ctypes.c_long(_CREATE_RULESET), None, None, get_version)))


def enter(isolation: str) -> None:
    """Isolate this process and the processes that it will start, irrevocably. The programs that it
    starts must also call `limit_program`."""
    if isolation == NONE:
        return
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if isolation == LANDLOCK:
        _restrict_files(landlock_version())
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of capset(2), this process
    no_capabilities = (ctypes.c_uint32 * 6)()
    _call("capset", header, no_capabilities)
    # no other process of this user may trace this process
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)
    _seccomp_filter()  # computed before the first program starts


def bubblewrap_command() -> list[str]:
    """The start of a command line that runs a runner in namespaces. They show the files that Python
    needs and the source code of the runner, all read-only."""
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--cap-drop",
        "ALL",
    ]
    for path in _readable_paths():
        # a device in a folder that is bound without --dev-bind cannot be opened
        command += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    command += ["--tmpfs", PACKAGE]
    for folder in Path(__file__).resolve().parents[:3]:
        for file in folder.glob("*.py"):
            command += ["--ro-bind", str(file), str(file)]
    return [*command, "--remount-ro", PACKAGE, "--remount-ro", "/"]


def limit_program(isolation: str, memory: int) -> None:
    """Set the hard limits of this process, and install the filter of system calls if the process is
    isolated. `memory`: bytes of address space (only on Linux, because macOS refuses this limit)."""
    limits = {
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        # pipes and sockets take memory that RLIMIT_AS does not count
        resource.RLIMIT_NOFILE: 16,
    }
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = memory
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
    if isolation == NONE:
        return
    code = ctypes.create_string_buffer(_seccomp_filter())
    step_count = (len(code) - 1) // 8
    program = ctypes.create_string_buffer(struct.pack("@HP", step_count, ctypes.addressof(code)))
    _call("prctl", _SET_SECCOMP, 2, program, 0, 0)  # 2: SECCOMP_MODE_FILTER


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (only on Linux)."""
    if sys.platform == "linux":
        _call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def thread_count(process: int) -> int:
    """Number of threads of a process; 0 without /proc. Landlock allows `stat` of any file."""
    try:
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    except OSError:
        return 0


def _call(name: str, *arguments: object) -> int:
    """Call a function of the C library, and return its result."""
    result = int(getattr(_libc, name)(*arguments))
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{name}: {os.strerror(error_number)}")
    return result


def _readable_paths() -> list[str]:
    """Paths that programs can read: system libraries, the interpreter and its packages. A parent
    comes before its children."""
    paths = {*_SYSTEM_FOLDERS, *_SYSTEM_FILES, sys.prefix, sys.base_prefix}
    paths |= {os.path.dirname(os.path.realpath(sys.executable)), os.path.dirname(os.__file__)}
    paths |= {os.path.realpath(path) for path in paths if not path.startswith("/dev/")}
    return sorted(path for path in paths if path and os.path.exists(path))


def _restrict_files(version: int) -> None:
    """Let this process open only the files of `_readable_paths` outside PACKAGE. `version`: version
    of Landlock, which may be older than the rights that are refused here."""
    file_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    # access to files, to TCP ports (since version 4), to local sockets and signals (since 6)
    refused = struct.pack("=QQQ", (1 << file_rights) - 1, 0b11, 0b11)
    size = 8 if version < 4 else 16 if version < 6 else 24
    refused_rights = ctypes.create_string_buffer(refused[:size])
    ruleset = _call(
        "syscall", ctypes.c_long(_CREATE_RULESET), refused_rights, ctypes.c_long(size), None
    )
    for readable in _readable_paths():
        for path, rights in _file_rules(os.path.realpath(readable)):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
            below_path = ctypes.c_long(1)
            _call(
                "syscall", ctypes.c_long(_ADD_RULE), ctypes.c_long(ruleset), below_path, rule, None
            )
            os.close(descriptor)
    _call("syscall", ctypes.c_long(_RESTRICT_SELF), ctypes.c_long(ruleset), None)
    os.close(ruleset)


def _file_rules(path: str) -> Iterator[tuple[str, int]]:
    """Yield (path, Landlock rights) so that all files below `path` but those in PACKAGE can be
    read. Names in parents of PACKAGE can be listed, which Python needs to find modules."""
    if PACKAGE.startswith(f"{path}/"):
        yield path, _READ_FOLDER
        for name in os.listdir(path):
            child = f"{path}/{name}"
            if not os.path.islink(child):  # a rule would apply to the target of the link
                yield from _file_rules(child)
    elif path == _NULL_DEVICE:
        yield path, _READ_FILE | _WRITE_FILE
    elif path != PACKAGE:
        yield path, _READ_FILE | (_READ_FOLDER | _EXECUTE if os.path.isdir(path) else 0)


@lru_cache
def _seccomp_filter() -> bytes:
    """The filter of system calls as a program of BPF, for little-endian machines."""
    abi, column = _ABIS[os.uname().machine]
    # Operations of BPF. Each of the `steps` is
    # (operation, number of steps to skip if true, number of steps to skip if false, operand).
    load, equal, at_least, has_bits, end = 0x20, 0x15, 0x35, 0x45, 0x06
    # results of the filter; an error number is added to `fail`
    kill, fail, allow = 0x80000000, 0x00050000, 0x7FFF0000
    # offsets in struct seccomp_data
    call_number, abi_of_call, first_argument = 0, 4, 16
    refuse = (end, 0, 0, fail | errno.EPERM)
    # end the process at a call of another ABI, because that ABI numbers its calls differently
    steps = [(load, 0, 0, abi_of_call), (equal, 1, 0, abi), (end, 0, 0, kill)]
    steps += [(load, 0, 0, call_number)]
    steps += [(at_least, 0, 1, _NEWER_CALLS), (end, 0, 0, fail | errno.ENOSYS)]
    for row in _rows(_REFUSED_CALLS):
        error = getattr(errno, row[3]) if len(row) > 3 else errno.EPERM
        if row[column] != "-":
            steps += [(equal, 0, 1, int(row[column])), (end, 0, 0, fail | error)]
    for row in _rows(_LIMITED_CALLS):
        values = [int(value, 0) for value in row[5].split(",")]
        block = [(load, 0, 0, first_argument + 8 * int(row[3]))]
        for index, value in enumerate(values):
            if row[4] == "not-in":
                block += [(equal, 0, 1, value), refuse]
            else:  # skip the remaining values and `refuse`
                operation = has_bits if row[4] == "has" else equal
                block.append((operation, len(values) - index, 0, value))
        if row[4] != "not-in":
            block.append(refuse)
        block.append((load, 0, 0, call_number))
        steps += [(equal, 0, len(block), int(row[column])), *block]
    steps.append((end, 0, 0, allow))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _rows(table: str) -> list[list[str]]:
    """The columns of each row of a table of system calls."""
    rows = (line.partition("#")[0].split() for line in table.splitlines())
    return [row for row in rows if row]
