"""How many broken lines the tests notice.

    python -m tools.mutate record [PYTEST ARGUMENTS]
    python -m tools.mutate break --seed 1 --lines 100

`record` runs the tests once and notes which test runs which line.

`break` draws lines of moe_lab and analysis by the seed, changes one expression of each in a copy of
the last commit, and runs the tests that run the line, the quickest first, as many as take five
minutes; those that `-m quick` selects come before all others. It prints each line that no test
noticed, for a person to say whether the change is equivalent, and writes all to FOLDER/SEED.jsonl.
A run that was interrupted resumes where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import coverage
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = Path("/var/tmp/moe_lab-mutations")
SECONDS = 300
"""What the tests of one line take together, at most; a change that makes them run three times as
long is noticed."""
TIMES = "tests.xml"
"""File of the folder with the time that each test took."""
TEST = "MOE_LAB_TEST"
"""Environment variable with the running test, which processes that it starts inherit."""
CONFIGURATION = f"""[run]
source =
    moe_lab
    analysis
data_file = {{folder}}/coverage
parallel = true
patch = subprocess
context = ${{{{{TEST}-}}}}
"""
COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
}
COMPARISONS |= {ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATIONS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OPERATIONS |= {ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}


def main() -> int:
    """Record or break; see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=("record", "break"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=100)
    options, words = parser.parse_known_args()
    if options.act == "record":
        return record(options.folder, words)
    if words:
        parser.error(f"{words[0]} is unknown")
    return break_lines(options.folder, options.seed, options.lines)


# The plugin that `record` gives to pytest.


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test whose lines are recorded from now on, in this process and in those that it
    starts."""
    os.environ[TEST] = nodeid
    if running := coverage.Coverage.current():
        running.switch_context(nodeid)


def record(folder: Path, words: Sequence[str]) -> int:
    """Run the tests, and note in FOLDER/coverage which of them runs which line; pytest's exit
    code."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("coverage*"):
        file.unlink()
    configuration = folder / "settings.ini"
    configuration.write_text(CONFIGURATION.format(folder=folder))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={configuration}", "-m", "pytest"]
    code = subprocess.run(
        [*command, "-p", "tools.mutate", "--junitxml", str(folder / TIMES), *words], cwd=ROOT
    ).returncode
    combined = coverage.Coverage(config_file=str(configuration))
    combined.combine([str(folder)])
    combined.save()
    print(f"lines that tests run: {combined.report(file=io.StringIO()):.1f} %")
    return code


def break_lines(folder: Path, seed: int, count: int) -> int:
    """Break `count` lines, and print how many no test noticed."""
    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    results = folder / f"{seed}.jsonl"
    done = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    copy = folder / f"copy_{seed}"
    shutil.rmtree(copy, ignore_errors=True)  # a run that was killed leaves a broken line in it
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    draw = random.Random(seed)
    seconds = seconds_of_tests(folder / TIMES)
    lines = sorted(tested_lines(data))
    draw.shuffle(lines)
    for file, number, tests in lines:
        changes = list(changes_of(copy / file, number))
        change = draw.choice(changes) if changes else None
        if change is None or len(done) >= count:
            continue
        if any(row["file"] == file and row["line"] == number for row in done):
            continue
        chosen = quickest(tests, seconds)
        if not chosen:
            continue
        row = {"file": file, "line": number, "after": change[1].strip(), "tests": len(chosen)}
        row["quick"] = is_noticed(copy, file, change[0], chosen, "-m", "quick")
        row["noticed"] = row["quick"] or is_noticed(copy, file, change[0], chosen)
        done.append(row)
        with results.open("a") as stream:
            print(json.dumps(done[-1]), file=stream)
        if not done[-1]["noticed"]:
            print(f"{file}:{number}: no test noticed: {change[1].strip()}", flush=True)
    quick = sum(row["quick"] for row in done)
    print(f"noticed: {sum(row['noticed'] for row in done)} of {len(done)}, by -m quick {quick}")
    return 0


def tested_lines(data: coverage.CoverageData) -> Iterator[tuple[str, int, list[str]]]:
    """(file, line, tests that run it) of each line that a test runs, not only an import."""
    # templates are measured too
    for measured in (file for file in data.measured_files() if file.endswith(".py")):
        for number, contexts in data.contexts_by_lineno(measured).items():
            if tests := sorted(name for name in contexts if "::" in name):
                yield str(Path(measured).relative_to(ROOT)), number, tests


def seconds_of_tests(file: Path) -> Mapping[str, float]:
    """`key_of_test` -> the time that the test took, for each test that passed: one that fails
    without a broken line would notice every line."""
    cases = ElementTree.parse(file).getroot().iter("testcase")
    return {
        key_of_test(case.attrib["classname"], case.attrib["name"]): float(case.attrib["time"])
        for case in cases
        if case.find("failure") is None and case.find("error") is None
    }


def quickest(tests: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """The tests in order of their time, as many as take SECONDS together, and at least one."""
    times = {
        test: seconds[key]
        for test in tests
        if (key := key_of_test(*test.split("::", 1))) in seconds
    }
    ordered = sorted(times, key=times.__getitem__)
    ends = itertools.accumulate(times[test] for test in ordered)
    return [test for test, end in zip(ordered, ends, strict=True) if end <= SECONDS] or ordered[:1]


def key_of_test(place: str, name: str) -> str:
    """What names a test in reports of both forms: `place` is a path or a module; classes are left
    out."""
    parts = place.removesuffix(".py").replace("/", ".").split(".")
    return ".".join(
        [part for part in parts if not part.startswith("Test")] + [name.rpartition("::")[2]]
    )


def changes_of(file: Path, number: int) -> Iterator[tuple[str, str]]:
    """(text of the file, its line) for each change of an expression that is on that line alone."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        if node.lineno != number or node.end_lineno != number:
            continue
        for new in replacements(node):
            line = lines[number - 1].encode()  # ast counts bytes
            changed = (
                line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
            ).decode()
            try:
                ast.parse("".join([*lines[: number - 1], changed, *lines[number:]]))
            except SyntaxError:  # inside an f-string, say
                continue
            yield "".join([*lines[: number - 1], changed, *lines[number:]]), changed


def replacements(node: ast.AST) -> Iterator[str]:
    """What an expression may be changed into."""
    match node:
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            yield f"{ast.unparse(left)} {COMPARISONS[type(operation)]} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            yield f"({ast.unparse(ast.BinOp(left, OPERATIONS[type(operation)](), right))})"
        case ast.BoolOp(op=operation, values=values):
            other = ast.And() if isinstance(operation, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"bool({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"({ast.unparse(orelse)} if {ast.unparse(test)} else {ast.unparse(body)})"
        case ast.Return(value=ast.expr()):
            yield "return None"
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield "pass"


def is_noticed(copy: Path, file: str, text: str, tests: Sequence[str], *arguments: str) -> bool:
    """Whether one of the tests fails, or does not end, with the changed file in the copy.
    `arguments`: more arguments of pytest.

    RuntimeError if there is no such test."""
    path = copy / file
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *arguments,
        *tests,
    ]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=3 * SECONDS
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(before, encoding="utf-8")
    if b"ERROR: not found: " in done.stderr:
        raise RuntimeError(done.stderr.decode())
    return done.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main())
