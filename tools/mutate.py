"""Mutation testing: the share of broken lines that the tests notice.

    python -m tools.mutate record [PYTEST ARGUMENTS]
    python -m tools.mutate break --seed 1 --lines 100

`record` runs the tests once and records which test runs which line.

`break` draws lines of moe_lab and analysis by the seed. In a copy of the last commit it changes one
expression of each line, and runs the tests that run this line and the other tests of their files:
the quickest of both, up to five minutes each; first those that `-m quick` selects, then all. It
prints each change that no test noticed, so that a person can decide whether it is equivalent, and
writes all results to FOLDER/SEED.jsonl. A run that was interrupted resumes where it stopped.
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
"""Most seconds of the tests that run a line, and of the others of their files, as `record` measured
them with coverage. A change with which they run three times as long counts as noticed."""
TIMES = "tests.xml"
"""Name of the file with the seconds of each test."""
TEST = "MOE_LAB_TEST"
"""Environment variable with the name of the running test, for the processes that it starts."""
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
"""Comparison -> the operator that replaces it."""
OPERATIONS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OPERATIONS |= {ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}
"""Arithmetic operation -> the operation that replaces it."""


def main() -> int:
    """Run the requested command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "break"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=100)
    options, pytest_arguments = parser.parse_known_args()
    if options.command == "record":
        return record(options.folder, pytest_arguments)
    if pytest_arguments:
        parser.error(f"{pytest_arguments[0]} is unknown")
    return break_lines(options.folder, options.seed, options.lines)


# The plugin that `record` gives to pytest.


def pytest_runtest_logstart(nodeid: str) -> None:
    """Set the test to which the lines are assigned that run from now on, in this process and in
    processes that it starts."""
    os.environ[TEST] = nodeid
    if current := coverage.Coverage.current():
        current.switch_context(nodeid)


def record(folder: Path, pytest_arguments: Sequence[str]) -> int:
    """Run the tests, and record in FOLDER/coverage which test runs which line; returns pytest's
    exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("coverage*"):
        file.unlink()
    configuration = folder / "settings.ini"
    configuration.write_text(CONFIGURATION.format(folder=folder))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={configuration}", "-m", "pytest"]
    code = subprocess.run(
        [*command, "-p", "tools.mutate", "--junitxml", str(folder / TIMES), *pytest_arguments],
        cwd=ROOT,
    ).returncode
    combined = coverage.Coverage(config_file=str(configuration))
    combined.combine([str(folder)])
    combined.save()
    print(f"lines that tests run: {combined.report(file=io.StringIO()):.1f} %")
    return code


def break_lines(folder: Path, seed: int, count: int) -> int:
    """Break `count` lines, and print how many of them tests noticed."""
    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    results = folder / f"{seed}.jsonl"
    rows = []
    if results.exists():
        rows = [json.loads(line) for line in results.read_text().splitlines()]
    copy = folder / f"copy_{seed}"
    shutil.rmtree(copy, ignore_errors=True)  # a run that was killed leaves a broken line in it
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    draw = random.Random(seed)
    seconds = seconds_of_tests(folder / TIMES)
    lines = sorted(tested_lines(data))
    draw.shuffle(lines)
    for file, number, tests in lines:
        changes = list(changes_of(copy / file, number))
        if not changes:
            continue
        text, changed_line = draw.choice(changes)  # also if the line is skipped, to draw the same
        if len(rows) >= count:
            continue
        if any(row["file"] == file and row["line"] == number for row in rows):
            continue
        selected = select(tests, seconds)
        if not selected:
            continue
        change = changed_line.strip()
        quick = is_noticed(copy, file, text, selected, "-m", "quick")
        noticed = quick or is_noticed(copy, file, text, selected)
        row = {"file": file, "line": number, "after": change, "tests": len(selected)}
        row |= {"quick": quick, "noticed": noticed}
        rows.append(row)
        with results.open("a") as stream:
            print(json.dumps(row), file=stream)
        if not noticed:
            print(f"{file}:{number}: no test noticed: {change}", flush=True)
    by_quick = sum(row["quick"] for row in rows)
    print(f"noticed: {sum(row['noticed'] for row in rows)} of {len(rows)}, by -m quick {by_quick}")
    return 0


def tested_lines(data: coverage.CoverageData) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (file, line number, tests that run the line) for each line of Python that a test runs;
    lines that run only during an import are left out."""
    for file in data.measured_files():
        if not file.endswith(".py"):  # templates are measured too
            continue
        for number, contexts in data.contexts_by_lineno(file).items():
            if tests := sorted(name for name in contexts if "::" in name):
                yield str(Path(file).relative_to(ROOT)), number, tests


def seconds_of_tests(file: Path) -> Mapping[str, float]:
    """Id of a test -> seconds, for each test that passed. A test that fails without a broken line
    is left out, because it would notice every line."""
    return {
        id_of_test(case.attrib["classname"], case.attrib["name"]): float(case.attrib["time"])
        for case in ElementTree.parse(file).getroot().iter("testcase")
        if all(case.find(result) is None for result in ("failure", "error", "skipped"))
    }


def select(tests: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """The tests to run for a line that `tests` run: the quickest of these, then the quickest others
    of their files. The others are needed because a fixture that several tests share runs only in
    the first of them. Tests without known seconds are left out.

    seconds: id of a test -> seconds, as `seconds_of_tests` gives them."""
    files = {test.partition("::")[0] for test in tests}
    known = [test for test in tests if test in seconds]
    others = [test for test in seconds if test.partition("::")[0] in files and test not in tests]
    return quickest(known, seconds) + quickest(others, seconds)


def quickest(tests: Sequence[str], seconds: Mapping[str, float]) -> list[str]:
    """The quickest tests, in order of their seconds: as many as take SECONDS together, and at least
    one."""
    ordered = sorted(tests, key=seconds.__getitem__)
    ends = itertools.accumulate(seconds[test] for test in ordered)
    return [test for test, end in zip(ordered, ends, strict=True) if end <= SECONDS] or ordered[:1]


def id_of_test(dotted_name: str, name: str) -> str:
    """Pytest's id of a test, from the dotted name of its module or class and its own name, as an
    XML report has them."""
    parts = dotted_name.split(".")
    classes = [part for part in parts if part.startswith("Test")]
    module = "/".join(part for part in parts if not part.startswith("Test"))
    return "::".join([f"{module}.py", *classes, name])


def changes_of(file: Path, number: int) -> Iterator[tuple[str, str]]:
    """Yield (changed text of the file, changed line) for each change of an expression that lies
    within the line of this number."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        if node.lineno != number or node.end_lineno != number:
            continue
        for replacement in replacements(node):
            line = lines[number - 1].encode()  # ast counts bytes
            start = line[: node.col_offset]
            end = line[node.end_col_offset :]
            changed_line = (start + replacement.encode() + end).decode()
            if changed_line == lines[number - 1]:  # such as `return None`
                continue
            changed_text = "".join([*lines[: number - 1], changed_line, *lines[number:]])
            try:
                ast.parse(changed_text)
            except SyntaxError:  # for example inside an f-string
                continue
            yield changed_text, changed_line


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield the code that may replace an expression or statement."""
    match node:
        case ast.Compare(left=left, ops=[operation], comparators=[right]):
            yield f"{ast.unparse(left)} {COMPARISONS[type(operation)]} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            yield f"({ast.unparse(ast.BinOp(left, OPERATIONS[type(operation)](), right))})"
        case ast.BoolOp(op=operation, values=values):
            opposite = ast.And() if isinstance(operation, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(opposite, values))})"
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
    """Whether one of the tests fails, or does not end, when the file in the copy has this text.

    arguments: further arguments of pytest. RuntimeError if pytest does not find a test."""
    path = copy / file
    original = path.read_text(encoding="utf-8")
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
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=6 * SECONDS
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original, encoding="utf-8")
    if b"ERROR: not found: " in result.stderr:
        raise RuntimeError(result.stderr.decode())
    return result.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main())
