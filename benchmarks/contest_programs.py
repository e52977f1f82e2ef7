"""Contest programs, judged by EvalScope's own function and by moe_lab's replacement.

benchmarks/evaluation_evalscope.py runs this in the interpreter that has EvalScope. Bar: both pass
the same number of tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SUMS = {
    "inputs": [f"2\n1 {n}\n{n} 5\n" for n in range(6)],
    "outputs": [f"{1 + n}\n{n + 5}.0\n" for n in range(6)],
}
SORTED = {
    "inputs": [f"[3, 1, {n}]\n2" for n in range(6)],
    "outputs": [json.dumps(sorted([3, 1, n], reverse=True)[:2]) for n in range(6)],
    "fn_name": "largest",
}
LINES = "for _ in range(int(input())):\n    print(sum(map(int, input().split())))"
INDENTED = LINES.replace("\n", "\n    ")
METHOD = "class Solution:\n    def largest(self, numbers, times):\n        "
RESULT = "sorted(numbers, reverse=True)[:times]"
PROGRAMS: dict[str, tuple[dict[str, Any], str]] = {
    "reads lines": (SUMS, LINES),
    "reads all of its input": (
        SUMS,
        (
            "import sys\nfor line in sys.stdin.read().split('\\n')[1:3]: "
            "print(eval(line.replace(' ', "
            "'+')))"
        ),
    ),
    "reads by readline": (SUMS, f"import sys\ninput = sys.stdin.readline\n{LINES}"),
    "reads by readlines": (
        SUMS,
        "import sys\nfor line in sys.stdin.readlines()[1:3]: print(sum(map(int, line.split())))",
    ),
    "reads the file of its input": (SUMS, "rows = open(0).read().split('\\n')\nprint(len(rows))"),
    "has a main block": (
        SUMS,
        f"def main():\n    {INDENTED}\nif __name__ == '__main__':\n    main()",
    ),
    "ends by exit": (SUMS, f"import sys\n{LINES}\nsys.exit(0)"),
    "recurses deeply": (SUMS, f"def down(n): return n and down(n - 1)\ndown(20000)\n{LINES}"),
    "uses a thread": (
        SUMS,
        (
            f"import threading\ndef main():\n    {INDENTED}\none = threading.Thread(target=main)\n"
            "one.start()\none.join()"
        ),
    ),
    "uses numpy": (
        SUMS,
        (
            "import numpy as np\nfor _ in range(int(input())):\n    "
            "print(np.sum(np.array(input().split(), dtype=int)))"
        ),
    ),
    "prints more": (SUMS, f"{LINES}\nprint('done')"),
    "prints no number": (SUMS, "print('a')\nprint('b')"),
    "rounds": (SUMS, LINES.replace("print(", "print(1e-9 + ")),
    "fails in the fifth test": (
        SUMS,
        (
            "for _ in range(int(input())):\n    a, b = map(int, input().split())\n    print(a + b "
            "+ "
            "(b == 4))"
        ),
    ),
    "divides by zero": (SUMS, "1 // 0"),
    "is no Python": (SUMS, "for"),
    "is empty": (SUMS, ""),
    "imports nothing that it uses": (
        SORTED,
        f"{METHOD}heapify(numbers); return nlargest(times, numbers)",
    ),
    "returns a list": (SORTED, f"{METHOD}return {RESULT}"),
    "returns a tuple": (SORTED, f"{METHOD}return tuple({RESULT})"),
    "returns floats": (SORTED, f"{METHOD}return [float(n) for n in {RESULT}]"),
    "returns a generator": (SORTED, f"{METHOD}return (n for n in {RESULT})"),
    "returns a deque": (SORTED, f"{METHOD}return deque({RESULT})"),
    "returns numpy's numbers": (
        SORTED,
        f"import numpy as np\n{METHOD}return [np.int64(n) for n in {RESULT}]",
    ),
    "changes its input": (SORTED, f"{METHOD}numbers.sort(); return numbers[::-1][:times]"),
    "remembers what it saw": (
        SORTED,
        f"{METHOD}self.seen = getattr(self, 'seen', 0) + 1; return {RESULT}[: 5 - self.seen]",
    ),
    "is a function": (SORTED, f"def largest(numbers, times):\n    return {RESULT}"),
    "has another name": (
        SORTED,
        f"class Solution:\n    def smallest(self, numbers, times):\n        return {RESULT}",
    ),
    "exits": (SORTED, f"{METHOD}exit()"),
    "kills itself": (SUMS, "import os\nos._exit(1)"),
}


def main() -> int:
    """Judge each program both ways and print the numbers of passed tests; returns 1 when they
    differ for a program."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from moe_lab.evaluation.adapters.evalscope_worker import Programs

    del sys.path[0]
    from evalscope.benchmarks.live_code_bench import evaluate_utils

    programs = Programs(sys.argv[1])
    differing = 0
    for name, (tests, program) in PROGRAMS.items():
        tests = {"fn_name": None, **tests}
        by_program, _ = evaluate_utils.evaluate_generations_by_problem(
            [program], {"input_output": json.dumps(tests)}, False, 6
        )
        results, _ = programs.run_tests(program, tests)
        by_evalscope = sum(result is True for result in by_program[0])
        here = sum(result is True for result in results)
        differs = by_evalscope != here
        differing += differs
        note = f" by EvalScope, {here} here" if differs else ""
        print(f"{name}: {by_evalscope}{note}", flush=True)
    print(f"{len(PROGRAMS)} programs, {differing} of them judged differently")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
