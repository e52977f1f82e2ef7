"""Confine a process by Linux namespaces: no network, no writable file, no readable file but
Python's own.

Standard library only, because runner processes load nothing else. A step that fails raises OSError;
there is no weaker fallback.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

# constants of Linux for unshare(2), clone(2), mount(2), umount2(2) and prctl(2)
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = (
    1 << bit for bit in (17, 26, 27, 28, 29, 30)
)
_READ_ONLY = 1
_NO_SETUID = 2
_NO_DEVICES = 4
_REMOUNT = 32
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
# nosuid, nodev, noexec, noatime, nodiratime: a remount may not clear them
_PRESERVED_FLAGS = 2 | 4 | 8 | 1024 | 2048
_DETACH = 2
_PARENT_DEATH_SIGNAL = 1
_SET_DUMPABLE = 4
_FILTER_CALLS = 22
_NO_NEW_PRIVILEGES = 38
_NOBODY = 65534
_MOUNTS = Path("/proc/self/mountinfo")
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store")
_ROOT = "/sys"
"""Folder on which the new file system is mounted. Every Linux has it, programs need nothing in it,
and unlike a temporary folder it does not have to be removed."""
_SYSTEM_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
# Machine -> (its number in the kernel's ABI, numbers of the system calls that are refused).
# shmget, semget, msgget, mq_open, add_key, request_key, keyctl, memfd_create, memfd_secret: what
# they create is not counted by the limits of a process, or outlives the program.
# io_uring_setup: calls made through a ring bypass this filter.
# bpf, perf_event_open, userfaultfd, ptrace, process_vm_readv, process_vm_writev: no answer needs
# them, and kernels have had vulnerabilities there.
_REFUSED_CALLS = {
    "x86_64": (
        0xC000003E,
        (29, 64, 68, 240, 248, 249, 250, 319, 447, 425, 321, 298, 323, 101, 310, 311),
    ),
    "aarch64": (
        0xC00000B7,
        (194, 190, 186, 180, 217, 218, 219, 279, 447, 425, 280, 241, 282, 117, 270, 271),
    ),
}
_SOCKET_CALLS = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""Numbers of socket and socketpair. A network namespace does not confine every family: AF_VSOCK
reaches other virtual machines and their host. So all sockets are refused but pairs of local ones,
which event loops and multiprocessing need."""

_LOCAL_SOCKETS = 1  # socket.AF_UNIX; a runner that imports less forks faster
_CLONE = {"x86_64": 56, "aarch64": 220}
"""Number of clone, whose first argument is the flags on these machines."""

_libc = ctypes.CDLL(None, use_errno=True)
_python = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock during a call


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library."""
    if getattr(_libc, name)(*arguments) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{name}: {os.strerror(error_number)}")


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    """Mount a file system at `target`; see mount(2) for the arguments."""
    # an argument of None stays None, which ctypes passes as the null pointer
    texts = [text and text.encode() for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), options and options.encode())


def _visible_paths() -> list[str]:
    """Paths that programs can read: system libraries, the interpreter and its packages."""
    paths = {*_SYSTEM_FOLDERS, *_SYSTEM_FILES, sys.prefix, sys.base_prefix}
    # targets of links too, since `_bind` copies a link without its target
    paths |= {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    paths |= {str(Path(sys.executable).resolve().parent), str(Path(os.__file__).resolve().parent)}
    visible_paths: list[str] = []
    for path in sorted(path for path in paths if path and os.path.exists(path)):
        if not any(path == parent or path.startswith(parent + "/") for parent in visible_paths):
            visible_paths.append(path)
    return visible_paths


def _bind(source: str) -> None:
    """Make the file or folder `source` visible at the same path below `_ROOT`; copy a link."""
    target = _ROOT + source
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o600))
    _mount(source, target, None, _BIND | _RECURSIVE)


def _mounts() -> dict[str, str]:
    """Mount id -> mount point, in this namespace."""
    rows = [line.split() for line in _MOUNTS.read_bytes().splitlines()]
    # a space in a path is written as \040
    return {
        os.fsdecode(row[0]): os.fsdecode(row[4].decode("unicode_escape").encode("latin-1"))
        for row in rows
    }


def _replace_root(hidden_folders: Iterable[str]) -> None:
    """Replace the root by a read-only file system that has only the paths of `_visible_paths`."""
    # private, so that mounts made here do not appear in other namespaces
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    mounts_before = _mounts()
    _mount("tmpfs", _ROOT, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=1m,mode=755")
    for source in _visible_paths():
        _bind(source)
    for path in hidden_folders:
        if os.path.isdir(_ROOT + path):
            _mount("tmpfs", _ROOT + path, "tmpfs", _NO_SETUID | _NO_DEVICES, "size=4k,mode=755")
    for mount_id, mount_point in _mounts().items():
        # the remount must repeat the flags that may not be cleared
        if mount_id not in mounts_before:
            flags = os.statvfs(mount_point).f_flag & _PRESERVED_FLAGS
            _mount("none", mount_point, None, _REMOUNT | _BIND | _READ_ONLY | flags)
    os.chdir(_ROOT)
    # pivot_root makes the current folder the root and mounts the old root over the new root;
    # umount2 then detaches the old root
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _DETACH)
    os.chdir("/")


def _drop_capabilities() -> None:
    """Give up all capabilities of this process; see capset(2)."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    no_capabilities = (ctypes.c_uint32 * 6)()
    _call("capset", header, no_capabilities)


def _install_seccomp_filter() -> None:
    """Make some system calls fail, in this process and in all processes that it starts.

    The calls in `_REFUSED_CALLS` fail with EPERM. `socket` fails with EAFNOSUPPORT, as does
    `socketpair` unless the sockets are local.
    """
    machine = os.uname().machine
    if machine not in _REFUSED_CALLS:
        raise OSError(errno.ENOSYS, f"the numbers of system calls on {machine} are not known")
    abi, refused_calls = _REFUSED_CALLS[machine]
    socket_call, socketpair_call = _SOCKET_CALLS[machine]
    # Operations of BPF. Each of the `steps` is
    # (operation, number of steps to skip if true, number of steps to skip if false, operand).
    load = 0x20
    equal = 0x15
    at_least = 0x35
    end = 0x06
    # results of the filter
    kill = 0x80000000
    refuse = 0x00050000 | errno.EPERM
    allow = 0x7FFF0000
    no_family = 0x00050000 | errno.EAFNOSUPPORT
    # offsets in struct seccomp_data, for little-endian machines
    call_number = 0
    abi_of_call = 4
    first_argument = 16
    # end the process at a call of another ABI, because that ABI numbers its calls differently
    steps = [(load, 0, 0, abi_of_call), (equal, 1, 0, abi), (end, 0, 0, kill)]
    steps += [(load, 0, 0, call_number)]
    # refuse the calls of x32, a second ABI of x86_64 whose numbers begin at 1 << 30
    steps += [(at_least, 0, 1, 1 << 30), (end, 0, 0, refuse)]
    for number in refused_calls:
        steps += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    steps += [(equal, 0, 1, socket_call), (end, 0, 0, no_family)]
    # skipping 3 steps leads to the last step
    steps += [(equal, 0, 3, socketpair_call), (load, 0, 0, first_argument)]
    steps += [(equal, 1, 0, _LOCAL_SOCKETS), (end, 0, 0, no_family)]
    steps.append((end, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    _call("prctl", _FILTER_CALLS, 2, program, 0, 0)  # 2: SECCOMP_MODE_FILTER


# Errors of a kernel that never allows namespaces, and the kinds of namespaces that `enter` makes.
_REFUSALS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS)
_KINDS = ("user", "pid", "mnt", "net", "ipc", "uts")


def is_refusal(error: OSError) -> bool:
    """Whether `error`, which `enter` raised, means that this machine does not allow confinement."""
    # ENOSPC: the limit on namespaces is reached. Only a limit of 0 is a refusal.
    if error.errno == errno.ENOSPC:
        files = [Path(f"/proc/sys/user/max_{kind}_namespaces") for kind in _KINDS]
        return any(file.exists() and file.read_text().strip() == "0" for file in files)
    # without /proc, `_replace_root` cannot list the mounts, so that `enter` always fails
    return error.errno in _REFUSALS or not _MOUNTS.exists()


def enter(hidden_folders: Iterable[str] = ()) -> None:
    """Confine this process irrevocably.

    Afterwards the process cannot reach the network and sees no other processes. Its root is
    read-only and has no /proc, /home or /tmp; the `hidden_folders` are empty.

    The function returns only in a forked child, which is process 1 of a new process tree. Root
    becomes the user `nobody`, because limits on the number of processes do not apply to root.
    Raises OSError, with the name of the system call that the kernel refused.
    """
    os.umask(0o022)  # the user `nobody` must be able to enter the parent folders of visible paths
    is_root = os.geteuid() == 0
    user = os.getuid()
    group = os.getgid()
    # a user other than root may mount file systems only in a new user namespace
    if not is_root:
        _call("unshare", _NEW_USER)
        # without this line, only a privileged user may write gid_map
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("unshare", _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_NETWORK | _NEW_PIDS)
    _replace_root(hidden_folders)
    if is_root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _install_seccomp_filter()
    _drop_capabilities()
    # only a fork is inside the new namespace of processes
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(1 if status else 0)
    die_with_parent()
    # no other process of this user may trace this process
    _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (only on Linux)."""
    if sys.platform.startswith("linux"):
        _call("prctl", _PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def fork_process_tree() -> int:
    """Fork as os.fork does, but make the child process 1 of a new process tree. The tree dies
    with the child. Raises OSError when the kernel refuses the clone.

    The C library caches the id of the thread, and does not notice this clone: in the child, the
    cached id is the id in the parent, which is right only if both ids are 1. So call this function
    only in a process that is process 1 and has a single thread, as after `enter`.

    The usual way takes twice as long: a fork, whose child changes its namespaces and forks again.
    """
    flags = ctypes.c_long(_NEW_USER | _NEW_PIDS | signal.SIGCHLD)
    # no new stack: the child continues on a copy of this stack, as after a fork
    zero = ctypes.c_long(0)
    _python.PyOS_BeforeFork()
    child = _python.syscall(
        ctypes.c_long(_CLONE[os.uname().machine]), flags, zero, zero, zero, zero
    )
    if child == 0:
        try:
            _python.PyOS_AfterFork_Child()
            _drop_capabilities()
        except BaseException:  # noqa: BLE001 - the child must not run the parent's handlers of errors
            os._exit(1)
        return 0
    # errno is read now, because PyOS_AfterFork_Parent may change it
    error_number = ctypes.get_errno()
    _python.PyOS_AfterFork_Parent()
    if child < 0:
        raise OSError(error_number, f"clone: {os.strerror(error_number)}")
    return int(child)


def limit_process(memory: int, processes: int) -> None:
    """Set hard limits of this process and its children. `memory`: bytes of address space (only on
    Linux, because macOS refuses this limit). `processes`: processes of this user."""
    limits = {
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    if sys.platform.startswith("linux"):
        limits[resource.RLIMIT_AS] = memory
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
