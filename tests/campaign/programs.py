"""Hostile programs, graded by the real grader: none may pass, change the verdict of another
program, or leave traces.

Every program defines f(x), which should return x + 1. A program that attempts something forbidden
returns x + 1 only if the attempt succeeds, so that the verdict `pass` means an escape. In a
program, MARK stands for a word for which the machine is searched afterwards, PORT for a port of a
listening server, SECRET for a private file, and FOLDER for the folder of this file.
"""

import ctypes
import os
import re
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from harness_files import problem, write_lines

from moe_lab.evaluation.adapters import evalplus
from moe_lab.evaluation.adapters.evalplus import Grader, GradeRequest


@dataclass(frozen=True)
class Program:
    """One program. `verdict` has the allowed verdicts of the grader, separated by spaces."""

    name: str
    text: str
    verdict: str = "fail"
    error: str = ""
    """Start of the runner's message on the program."""
    calls: int = 3
    """Number of calls."""


MODULES = {
    "gc",
    "mmap",
    "os",
    "resource",
    "signal",
    "socket",
    "stat",
    "subprocess",
    "sys",
    "threading",
    "time",
}


def _function_program(name: str, *lines: str, verdict: str = "fail", **more: Any) -> Program:
    """A program whose f(x) has these lines. It imports those of MODULES that occur in the lines."""
    body = "".join(f"    {line}\n" for line in lines)
    modules = ", ".join(sorted(MODULES & set(re.findall(r"\w+", body)))) or "sys"
    return Program(name, f"import {modules}\ndef f(x):\n{body}", verdict, **more)


def _attempt(name: str, *lines: str, verdict: str = "fail") -> Program:
    """A program that returns the right value if the lines, of which the last may be a `return`,
    raise no exception."""
    attempts = (f"    {line}" for line in lines)
    return _function_program(
        name,
        "try:",
        *attempts,
        "except BaseException:",
        "    return 0",
        "return x + 1",
        verdict=verdict,
    )


BROKEN = [
    Program("divides by zero", "def f(x): return 1 / 0", error="ZeroDivisionError"),
    Program("is no Python", "def f(x: return", error="SyntaxError"),
    Program("lacks the function", "def g(x): return 1", error="KeyError"),
    Program("exits while it is loaded", "raise SystemExit", error="SystemExit"),
    Program("recurses without end", "def f(x): return f(x)", error="RecursionError"),
    Program("takes 1.2 GiB", "def f(x): return len(bytearray(1200 << 20))", error="MemoryError"),
    _function_program("ends well", "os._exit(0)", verdict="crash"),
    Program("reads at address 0", "import ctypes\ndef f(x): ctypes.string_at(0)", "crash"),
    _function_program(
        "floods the results", "while True: os.write(3, b'x' * 99999)", verdict="output"
    ),
    _function_program(
        "sends no text",
        "os.write(3, bytes([200, 10]))",
        verdict="output",
        error="it returned something that is not a value",
    ),
    _function_program(
        "sends three results for a call",
        "os.write(3, b'1\\n2\\n3\\n')",
        "return 1",
        verdict="crash fail",
    ),
    Program(
        "cannot say why",
        "class E(Exception):\n    def __str__(self): raise self\ndef f(x): raise E",
        error="E: ",
    ),
]
ENDLESS = [
    _function_program("loops", "while True: pass", verdict="timeout"),
    _function_program(
        "loops and catches everything",
        *("while True:", "    try:", "        while True: pass", "    except BaseException: pass"),
        verdict="timeout",
    ),
    Program("adds up 10 ** 12 numbers", "def f(x): return sum(range(10 ** 12))", "timeout"),
    Program("loops while it is loaded", "while True: pass", "timeout"),
    Program("sleeps", "import time\ndef f(x): time.sleep(1000)", "timeout"),
    _function_program(
        "ignores SIGTERM",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "while True: pass",
        verdict="timeout",
    ),
    _function_program(
        "gives an endless iterator",
        "def ones():",
        "    while True: yield 1",
        "return ones()",
        verdict="fail timeout",
    ),
    Program(
        "matches a pattern for ever",
        "import re\ndef f(x): return re.match('(a+)+$', 'a' * 64 + 'b')",
        "timeout",
    ),
    Program("raises to a huge power", "def f(x): return pow(9 ** 9999, 9 ** 999)", "timeout fail"),
    Program(
        "stops itself",
        "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)",
        "timeout fail",
    ),
    _function_program(
        "forks without end",
        "while True:",
        "    try: os.fork()",
        "    except OSError: pass",
        verdict="timeout",
    ),
    _function_program(
        "sends its line in pieces, for ever",
        "while True: os.write(3, b'1')",
        verdict="output timeout",
    ),
]
SENT = {
    "a ratio over zero": """b'{"kind":"ratio","value":["0x1","0x0"]}'""",
    "an infinite hash": """b'{"kind":"huge","value":Infinity}'""",
    "a value like nothing": """b'{"kind":"like","value":[]}'""",
    "no text": "bytes([200, 201])",
    "no JSON": "b'{'",
    "lists in lists": "b'[' * 60000",
    "many lists": "b'[' + b'[],' * 15000000 + b'[]]'",
    "numbers with one hash": (
        """b'{"kind":"set","value":[%s]}' % """
        "','.join(str(n * (2**61 - 1)) for n in range(1, 60000)).encode()"
    ),
    "a number of many digits": "b'9' * 1000000",
    "a kind nobody knows": """b'{"kind":"eval","value":"1"}'""",
    "a set of lists": """b'{"kind":"set","value":[[1]]}'""",
    "nothing": "b''",
    "a digest": """b'{"kind":"huge","value":"%s"}' % (b'0' * 64)""",
    "a digest that is a list": """b'{"kind":"huge","value":[2]}'""",
    "an array of objects": """b'{"kind":"numpy","value":["O",[1],"AAAAAAAAAAA="]}'""",
    "an array of 10 ** 18 items": (
        """b'{"kind":"numpy","value":["|i1",[1%s],"AA=="]}' % (b'0' * 18)"""
    ),
    "a number of 2 ** 40 letters": """b'{"kind":"numpy","value":["<U1099511627776",[],""]}'""",
    "floats that are text": """b'{"kind":"floats","value":"zzz"}'""",
    "a decimal of many digits": """b'{"kind":"decimal","value":"1e999999999999999999"}'""",
    "a mapping of lists": """b'{"kind":"mapping","value":[[[1],2]]}'""",
    "an array without items": """b'{"kind":"numpy","value":["<i8",[1,0],""]}'""",
    "an array of two truths": """b'{"kind":"numpy","value":["?",[2,1],"AQE="]}'""",
    "a time that is none": """b'{"kind":"numpy","value":["<m8[s]",[],"AAAAAAAAAIA="]}'""",
    "two values in a line": "b'2 2'",
    "a number that is none, in numbers": """b'{"kind":"floats","value":"AAAAAAAA+H8="}'""",
    "control characters": "b'\\0' * 30000000",
}
"""Description -> Python expression of the bytes that a program writes to the channel of its
results."""
SENDING = [
    _function_program(
        f"sends {name}",
        *(f"rest = {sent} + b'\\n'", "while rest: rest = rest[os.write(3, rest):]", "os._exit(0)"),
        verdict="output fail timeout",  # which a busy machine takes to write the longest
        calls=1,
    )
    for name, sent in SENT.items()
] + [
    Program(
        "gives a ratio over zero",
        "import numbers\nclass R(numbers.Rational):\n    numerator, denominator = 1, 0\n"
        "R.__abstractmethods__ = frozenset()\ndef f(x): return R()",
        "output fail",
        calls=1,
    )
]
CHEATS = [
    *(
        Program(
            f"gives {kind} equal to everything",
            f"class Any({kind}):\n    def __eq__(self, o): return True\n    __hash__ = "
            f"{kind}.__hash__\n"
            "def f(x): return Any()",
        )
        for kind in ("object", "int", "str", "list")
    ),
    _function_program(
        "looks through frames",
        "frame = sys._getframe()",
        "while frame:",
        "    for name, value in {**frame.f_globals, **frame.f_locals}.items():",
        "        if 'expected' in name or 'canonical' in name: return value[x - 1]",
        "    frame = frame.f_back",
    ),
    _function_program(
        "looks through memory",
        "for thing in gc.get_objects():",
        "    if isinstance(thing, dict) and 'canonical_solution' in thing: return x + 1",
    ),
    _function_program("forges lines", "os.write(3, b'2\\n3\\n')", "os._exit(0)", verdict="crash"),
    _function_program(
        "forges a file",
        "import glob",
        (
            "for path in glob.glob('/tmp/moe_lab-grade-*/*'): open(path, "
            "'w').write('{\"verdicts\": "
            "{}}')"
        ),
    ),
    Program(
        "changes the comparison", "import json\njson.dumps = lambda *a: '2'\ndef f(x): return x"
    ),
    Program(
        "changes equality of numbers",
        (
            "import builtins, operator\nbuiltins.all = lambda *a: True\noperator.eq = lambda *a: "
            "True\ndef f(x): return 0"
        ),
    ),
    Program(
        "gives what unpickles to anything",
        "class P:\n    def __reduce__(self): return (eval, ('2',))\ndef f(x): return P()",
    ),
    Program("gives itself", "def f(x): return f"),
    Program("gives a list in itself", "def f(x):\n    a = []\n    a.append(a)\n    return a"),
    Program("gives not a number", "def f(x): return float('nan')"),
    Program("hides what it raises", "class E(BaseException): pass\ndef f(x): raise E"),
    _function_program("closes the channel", "os.close(3)", "return x + 1", verdict="fail crash"),
    Program(
        "answers in the runner's place",
        'import os\nSAYS = b\'{"done": {"status": "ok", "error": "", "encoded": ["2"], "seconds": '
        "[0]}}\\n'\n"
        "def f(x):\n    for number in (1, *range(4, 200)):\n        try: os.write(number, SAYS)\n"
        "        except OSError: pass\n    return 0",
    ),
]
GRADING = [
    _function_program(
        "finds the solution in freed memory",
        "import ctypes, re",
        "libc = ctypes.CDLL(None)",
        "libc.sbrk.restype = ctypes.c_void_p",
        "output, channel = os.pipe()",
        "places = {id(thing) >> 20 << 20 for thing in gc.get_objects()}",
        "for start in [libc.sbrk(0) - (4 << 20), *places]:",
        "    for page in range(start, start + (4 << 20), 4096):",
        "        if libc.write(channel, ctypes.c_void_p(page), 1) == 1:  # it can be read",
        "            os.read(output, 1)",
        "            for found in re.findall(b'its sol.tion', ctypes.string_at(page, 4096)):",
        "                if found[7] == ord('u'): return x + 1",
        verdict="fail timeout",
    ),
    _function_program(
        "finds the solution in the texts of its process",
        "names = {*sys.argv, *sys.orig_argv, *os.environ.values()}",
        "texts = [text for thing in gc.get_objects() for text in gc.get_referents(thing)]",
        "for text in [*names, *(text for text in texts if isinstance(text, str))]:",
        "    if 'its sol{}tion'.format('u') in text: return x + 1",
    ),
    *(
        _function_program(
            f"claims to be of the class {kind}",
            "class Claim:",
            f"    __class__ = property(lambda self: {kind})",
            "    __eq__ = lambda self, other: True",
            "    __iter__ = lambda self: iter([self])",
            "    __len__ = __index__ = bit_length = lambda self: 1",
            "    __float__ = lambda self: 2.0",
            "return Claim()",
        )
        for kind in ("int", "float", "list", "str")
    ),
    _function_program(
        "has a type that equals every type",
        "class Kind(type):",
        "    __eq__ = lambda self, other: True",
        "    __hash__ = lambda self: hash(int)",
        "class Value(metaclass=Kind):",
        "    __eq__ = lambda self, other: True",
        "return Value()",
    ),
    _function_program(
        "goes on as its own runner",
        'says = b\'{"done": {"status": "ok", "error": "", "encoded": ["2"], \'',
        "says += b'\"seconds\": [0]}}\\n'",
        "def go_on(*_):",
        "    for number in range(256):",
        "        try: os.write(number, says)",
        "        except OSError: pass",
        "os._exit = os.close = go_on",
        "raise SystemExit",
        verdict="fail crash output",
    ),
    _function_program(
        "ends its main thread, and answers from another",
        "import ctypes",
        "def later():",
        "    time.sleep(0.1)",
        "    while True: os.write(3, b'2\\n')",
        "threading.Thread(target=later).start()",
        "number = {'x86_64': 60, 'aarch64': 93}[os.uname().machine]",
        "ctypes.CDLL(None).syscall(number, 0)",
        verdict="crash output fail timeout",
    ),
    _function_program(
        "replaces what the runner calls",
        "import json, moe_lab.evaluation.sandbox.runner as runner",
        'json.dumps = runner.encode_result = lambda *_: \'{"kind": "opaque", "value": 2}\'',
        "sys.modules['__main__'].encode_result = runner.encode_result",
        "return 2",
    ),
    _function_program("gives 10 ** 6 bits of a number", "return 1 << 10 ** 6"),
    _function_program(
        "equals every number by its operators",
        "class N(float):",
        "    __eq__ = __le__ = __ge__ = lambda self, other: True",
        "    __sub__ = __rsub__ = __abs__ = lambda self, *other: 0.0",
        "    __hash__ = float.__hash__",
        "return N(0)",
    ),
    _function_program(
        "has every length, item and answer",
        "class A(list):",
        "    __len__ = lambda self: 10 ** 6",
        "    __getitem__ = lambda self, place: self",
        "    __eq__ = lambda self, other: True",
        "return A([0])",
    ),
    _function_program(
        "equals by a class that changes",
        "class V:",
        "    def __eq__(self, other): self.__class__ = int; return True",
        "    __hash__ = lambda self: x + 1",
        "return V()",
    ),
    _function_program(
        "is a mapping of everything to itself",
        "from collections.abc import Mapping",
        "class M(Mapping):",
        "    __getitem__ = lambda self, key: key",
        "    __iter__ = lambda self: iter([2])",
        "    __len__ = lambda self: 1",
        "    __eq__ = lambda self, other: True",
        "return M()",
    ),
    _function_program(
        "is a mapping without end",
        "from collections import UserDict",
        "from itertools import count",
        "class M(UserDict):",
        "    items = lambda self: zip(count(), count())",
        "return M()",
        verdict="fail output timeout",
    ),
    _function_program(
        "replaces numpy",
        "from types import ModuleType, SimpleNamespace",
        "class N:",
        "    dtype = SimpleNamespace(kind='i', str='<i8')",
        "    shape, nbytes = (), 8",
        "    tobytes = lambda self: b'x'",
        "fake = sys.modules['numpy'] = ModuleType('numpy')",
        "fake.ndarray = fake.generic = N",
        "return N()",
        verdict="fail output",
    ),
    _function_program(
        "sends the next results in a thread",
        "def later():",
        "    while True: os.write(3, b'2\\n')",
        "threading.Thread(target=later, daemon=True).start()",
        "time.sleep(0.05)",
        "return 0",
        verdict="fail crash output",
    ),
    _function_program(
        "leaves a thread that answers",
        "def later():",
        "    time.sleep(0.2)",
        "    os.write(3, b'2\\n3\\n4\\n')",
        "threading.Thread(target=later).start()",
        "return 0",
    ),
    _function_program(
        "answers at the exit",
        "import atexit",
        "atexit.register(os.write, 3, b'2\\n3\\n4\\n')",
        "sys.exit()",
    ),
    _function_program(
        "remembers for the next program",
        "import moe_lab.evaluation.sandbox.encoding as encoding",
        "encoding._DECODERS.clear()",
        "encoding._FORMS.clear()",
        "return 0",
        verdict="fail",
    ),
    _function_program(
        "floods by an endless text", "return 'ab' * (100 << 20)", verdict="fail timeout output"
    ),
    _function_program(
        "floods by control characters",
        "return ['\\0' * 40_000] * 4_000",
        verdict="fail timeout output",
    ),
    _function_program(
        "takes thousands of threads with small stacks",
        "threading.stack_size(32768)",
        "for _ in range(9999): threading.Thread(target=time.sleep, args=(9,)).start()",
        verdict="crash fail timeout",
    ),
]
FOLDERS = ("/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/usr", "/root", "/home", "/sys")


def _anywhere(name: str, action: str) -> Program:
    """A program that returns the right value if `action` succeeds in some folder."""
    folders = f"for folder in [*{FOLDERS}, 'FOLDER', os.path.dirname(os.__file__)]:"
    lines = (folders, f"    try: done += {action}", "    except OSError: pass")
    return _attempt(name, "done = 0", *lines, "if not done: return 0")


FILES = [
    _anywhere("writes a file", "open(folder + '/MARK', 'w').write('x')"),
    _anywhere("makes a folder", "os.mkdir(folder + '/MARK') is None"),
    _anywhere("makes a link", "os.symlink('/etc/passwd', folder + '/MARK') is None"),
    _attempt(
        "makes a file without a name", "os.write(os.open('/tmp', os.O_TMPFILE | os.O_RDWR), b'x')"
    ),
    _attempt("makes a device", "os.mknod('/dev/MARK', 0o600 | stat.S_IFBLK, os.makedev(8, 0))"),
    _attempt("writes to a library", "open(os.__file__, 'a').write('#')"),
    _attempt("sets the time of a library", "os.utime(os.__file__)"),
    _attempt("makes everything writable", "os.chmod('/usr', 0o777)"),
    _attempt("renames a private file", "os.rename('SECRET', 'FOLDER/MARK')"),
    _attempt("reads the arguments of its parent", "open(f'/proc/{os.getppid()}/cmdline').read()"),
    _attempt("reads a private file", "open('SECRET').read()"),
    _attempt("lists a private folder", "os.listdir('FOLDER')"),
    _attempt("reads the passwords", "open('/etc/shadow').read()"),
    _attempt("reads the users", "open('/etc/passwd').read()"),
    _attempt("reads another process's environment", "open('/proc/1/environ').read()"),
    _attempt("reads its parent's memory", "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)"),
    _attempt("goes through a process's root", "os.listdir('/proc/self/root/home')"),
    _attempt("reads our code", "import moe_lab.evaluation.harnesses.evalplus"),
    _attempt(
        "finds a key",
        "if not any('KEY' in k or 'TOKEN' in k or 'HOME' in k for k in os.environ): return 0",
    ),
    _attempt("writes to the disk itself", "open('/dev/vda', 'r+b').read(1)"),
    _attempt(
        "starts a shell that writes",
        "subprocess.run('echo x > FOLDER/MARK', shell=True, check=True)",
    ),
]
NETWORK = [
    _attempt("connects by TCP", "socket.create_connection(('127.0.0.1', PORT), 1)"),
    _attempt("connects by IPv6", "socket.create_connection(('::1', PORT), 1)"),
    _attempt("sends by UDP", "socket.socket(2, 2).sendto(b'MARK', ('127.0.0.1', PORT))"),
    _attempt("connects to a local socket", "socket.socket(1, 1).connect('\\0MARK')"),
    _attempt("asks for a name", "socket.gethostbyname('example.org')"),
    _attempt("opens a raw socket", "socket.socket(2, 3, 1)"),
    _attempt("opens a socket to the kernel", "socket.socket(16, 3)"),
    _attempt("opens a socket to the host", "socket.socket(40, 1)"),
    _attempt("listens", "socket.create_server(('127.0.0.1', 0))"),
    _attempt(
        "sends through a pair of datagrams",
        "pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "pair[0].connect('\\0MARK')",
    ),
    _attempt("connects a pair of streams anew", "socket.socketpair()[0].connect('\\0MARK')"),
    _attempt(
        "fetches a page",
        "import urllib.request",
        "urllib.request.urlopen('http://127.0.0.1:PORT/', timeout=1)",
    ),
]
PROCESSES = [
    _function_program(
        "leaves a daemon",
        "if os.fork() == 0:",
        "    os.setsid()",
        "    os.execv('/bin/sh', ['sh', '-c', ': MARK; while true; do sleep 1; done'])",
    ),
    _function_program(
        "ignores hanging up",
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "if os.fork() == 0:",
        "    while True: pass",
    ),
    _attempt("spawns a process", "os.posix_spawn('/bin/true', ['true'], {})"),
    _function_program("kills its parent", "os.kill(os.getppid(), 9)", verdict="fail crash"),
    _function_program("kills everybody", "os.kill(-1, 9)", verdict="fail crash"),
    _function_program("kills its group", "os.killpg(0, 9)", verdict="crash fail"),
    _function_program(
        "kills by number",
        "for p in range(2, 9999):",
        "    try: os.kill(p, 9)",
        "    except OSError: pass",
    ),
    _function_program("stops its parent", "os.kill(os.getppid(), 19)", verdict="fail crash"),
    _attempt(
        "takes three processes",
        "for _ in range(3):",
        "    if os.fork() == 0: os.read(os.pipe()[0], 1)",
    ),
    _attempt(
        "takes threads",
        "for _ in range(99): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ),
    _attempt("goes before all others", "os.nice(-20)"),
    _attempt(
        "signals its parent through a pipe",
        "import fcntl",
        "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    ),
    _attempt("raises its limits", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    _attempt("limits its parent", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"),
]
MEMORY = [
    _attempt("takes 10 GiB at once", "len(bytearray(10 << 30))"),
    _attempt(
        "takes 2 GiB in pieces",
        "pieces = [bytearray(1 << 20) for _ in range(2048)]",
        verdict="fail timeout",
    ),
    _attempt("maps 2 GiB", "mmap.mmap(-1, 2 << 30)"),
    _attempt(
        "shares memory",
        "from multiprocessing.shared_memory import SharedMemory",
        "SharedMemory(create=True, size=9)",
    ),
    _attempt("makes a file in memory", "os.memfd_create('m')"),
    _function_program(
        "overflows the stack",
        "sys.setrecursionlimit(10 ** 9)",
        "return f(x)",
        verdict="crash fail timeout",
    ),
    Program("repeats a text 2 ** 40 times", "def f(x): return 'x' * (1 << 40)"),
    _function_program(
        "prints 2 GiB", "for _ in range(2000): print('x' * (1 << 20))", verdict="fail timeout"
    ),
]

SOLUTION = f"return x + 1  # {'this is its solution ' * 99}"
RIGHT = "def f(x): return x + 1"
WRONG = "def f(x): return x"
SECONDS = 0.5
MEMORY_MIB = 512
MOST_PROGRAM_SECONDS = 4 * (3 * SECONDS + 1) + 1
"""Largest number of wall-clock seconds for the calls of one program; tests of the runner state the
rule."""
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, every descendant of this process becomes its child when the descendant's parent
    ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def failures(programs: Sequence[Program], isolation: str) -> list[str]:
    """Grade `programs` with a kind of isolation, each followed by a right and a wrong program.
    Returns a sentence for each forbidden verdict and for each trace."""
    adopt_orphans()
    mark = f"moe_lab_escape_{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name,
        listeners(mark) as (port, connections),
    ):
        folder = Path(name)
        (folder / "secret").write_text("secret")
        (folder / "temporary").mkdir()
        traces_before = _traces(mark, folder)
        texts = []
        rows = []
        for row in programs:
            text = row.text
            for word, value in {
                "MARK": mark,
                "PORT": port,
                "SECRET": folder / "secret",
                "FOLDER": folder,
            }.items():
                text = text.replace(word, str(value))
            for body, calls in ((text, row.calls), (RIGHT, 1), (WRONG, 1)):
                rows.append(
                    problem(len(rows), "f", SOLUTION, [[x + 1] for x in range(calls)], [[9]])
                )
                texts.append((rows[-1]["task_id"], body))
        data = str(write_lines(folder / "data.jsonl", rows))
        limits = {"seconds": SECONDS, "memory_mib": MEMORY_MIB, "processes": 2}
        request = GradeRequest("humaneval", data, texts, isolation, **limits)
        start = time.monotonic()
        with (
            mock.patch.dict(os.environ, TMPDIR=str(folder / "temporary")),
            mock.patch.object(evalplus, "_COMPARISON_LIMITS", (1.0, 1 << 30)),
        ):
            grader = Grader()
            verdicts = [verdict.plus for verdict in grader.grade(request)]
        grader.close()
        seconds = time.monotonic() - start
        sentences = [*(_traces(mark, folder) - traces_before), *connections()]
    if seconds > (limit := 30 + len(programs) * MOST_PROGRAM_SECONDS / 2):
        sentences.append(f"grading took {seconds:.0f} s, and its limits allow {limit:.0f}")
    for row, verdict, right, wrong_verdict in zip(
        programs, verdicts[::3], verdicts[1::3], verdicts[2::3], strict=True
    ):
        if verdict not in row.verdict.split():
            sentences.append(f"{row.name}: its verdict is {verdict}")
        if (right, wrong_verdict) != ("pass", "fail"):
            sentences.append(
                f"{row.name}: the right and the wrong program after it are said to {right} and "
                f"{wrong_verdict}"
            )
    return sentences


@contextmanager
def listeners(mark: str) -> Iterator[tuple[int, Callable[[], list[str]]]]:
    """Listen on a port by TCP and UDP, and on a local socket named by the mark. Yields (port,
    function that lists the connections)."""
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as local,
    ):
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        local.bind(f"\0{mark}")
        local.listen()
        names = {tcp: "TCP", udp: "UDP", local: "a local socket"}
        yield (
            port,
            lambda: [
                f"something came in by {names[listener]}"
                for listener in select.select(list(names), [], [], 0)[0]
            ],
        )


def _traces(mark: str, folder: Path) -> set[str]:
    """Traces of programs: files called `mark`, running processes, and shared memory, semaphores and
    queues."""
    folders = [Path(os.__file__).parent, folder, *map(Path, FOLDERS)]
    traces = {
        f"there is {place / mark}"
        for place in folders
        if os.access(place, os.X_OK) and os.path.lexists(place / mark)
    }
    traces |= {f"there is {file}" for file in folder.glob("temporary/*")}
    for process in psutil.process_iter(["cmdline"]):
        if mark in " ".join(process.info["cmdline"] or []):
            traces.add(f"process {process.pid} goes on")
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, os.WNOHANG)
        elif "moe_lab.evaluation" in " ".join(child.cmdline()):
            traces.add(f"process {child.pid} of the grader goes on")
    for kind in ("shm", "sem", "msg"):
        table = Path("/proc/sysvipc") / kind
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        traces |= {f"{kind} {line.split()[1]}" for line in lines}
    return traces
