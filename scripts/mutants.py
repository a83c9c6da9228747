"""Mutants of the package: small, seeded faults in its code, and which of them the tests notice.

    python scripts/mutants.py draw --seed 0 --count 400              # writes tests/mutants.toml anew
    python scripts/mutants.py run --only core/ --into other.toml     # plants each mutant of these files, and runs tests
    pytest -vv -n 60 > passed.txt; python scripts/mutants.py run --jobs 60 --baseline passed.txt --limits 60 120
    python scripts/mutants.py show [other.toml]                      # a table: killed of all, by folder and kind

A mutant is one expression or statement that is replaced: an operator, a bound, a constant that is off by one, a check
that is dropped, arguments that are swapped. `run` plants it in a copy of the checkout and runs, until one fails, the
tests that killed it before, those of its file, of its folder, of errors, the laws, and those of its part of the
package, processes last. What fails has to fail again, alone, and to pass without the mutant. What no test notices
survives, also if --limits stopped a stage of tests; some survivors change no result. Sensitive rooms come first, and in
them what may survive. Results are appended as they come; what has one in the file is not run again, so another file
compares commits. A mutant is found by the text that it replaces in its function, and if that is gone, in any function
of this name.
"""

import ast
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Annotated, Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutants.toml"
FOLDERS = ("core", "datasets", "preprocess", "codebooks", "dataloader", "training", "cli")
# What only GPUs run, what draws, and what leaves the package.
NOT_MUTATED = "__init__|/warmup|reports/|metrics/writers"
# Rooms where a silent fault costs most have twice as many.
SENSITIVE = ("agree", "connection", "layout", "state/", "collate/", "preprocess/")
SKIPPED = (ast.JoinedStr, ast.arguments)
SWAPS = {"Lt": "LtE", "Gt": "GtE", "Eq": "NotEq", "In": "NotIn", "Is": "IsNot", "And": "Or", "Add": "Sub"}
SWAPS |= {"LShift": "RShift", "BitAnd": "BitOr"}
SWAPS |= {after: before for before, after in SWAPS.items()} | {"Mult": "Add", "FloorDiv": "Mult", "Mod": "FloorDiv"}
OPPOSITES = {getattr(ast, before): getattr(ast, after) for before, after in SWAPS.items()}
OPPOSITE_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
LIGHT, HEAVY = (f"{prefix}processes and not long and not examples" for prefix in ("not ", ""))
TEST = r"(tests/\S+\.py(?:::[^\s\[]+)?)"  # a file, or a function with all of its parameters
SURVIVED, GONE, START = "survived", "gone", "the start of the tests"

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
Into = Annotated[Path, typer.Option(help="The file of results.")]
Baseline = Annotated[Path | None, typer.Option(help="What `pytest -vv -n` printed; what failed there is left out.")]
Limits = Annotated[tuple[int, int], typer.Option(help="Seconds of a test, and of a stage of tests.")]
SLOW = (300, 3600)  # many times what they take, also on a busy machine


class Mutant(NamedTuple):
    """A fault: `before`, in a function of a file, is replaced by `after`."""

    name: str
    file: str
    line: int  # where it was drawn
    function: str
    kind: str
    before: str
    after: str
    nth: int  # of those in the function that have the same text, from 0 on


def sites(source: str) -> Iterator[tuple[Any, str, str, str, str]]:
    """Yield each node that can be mutated: with the name of its function, a kind, its text and its replacement."""
    stack: list[tuple[ast.AST, str]] = [(ast.parse(source), "")]
    while stack:
        node, function = stack.pop()
        # No test can judge types and texts; defaults are documented.
        skipped = [getattr(node, name, None) for name in ("annotation", "returns")]
        for child in reversed([*ast.iter_child_nodes(node)]):
            if child not in (*skipped, *getattr(node, "decorator_list", ())) and not isinstance(child, SKIPPED):
                name = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else ""
                stack.append((child, f"{function}.{name}".strip(".")))
        for kind, after in replacements(node) if function and hasattr(node, "lineno") else ():
            before = ast.get_source_segment(source, node) or ""
            if after.strip("()") != before.strip("()"):
                yield node, function, kind, before, after


def replacements(node: Any) -> Iterator[tuple[str, str]]:
    """Yield a kind and a text for each way to mutate a node."""

    def changed(**fields: Any) -> str:
        return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))

    match node:
        case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in OPPOSITES:
            if not (isinstance(right, ast.Constant) and right.value is None):
                yield "comparison", f"({changed(ops=[OPPOSITES[type(operator)]()])})"
        case ast.BinOp(op=operator, left=left) if type(operator) in OPPOSITES:
            if not isinstance(getattr(left, "value", None), str):
                yield "operator", f"({changed(op=OPPOSITES[type(operator)]())})"
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "operator", f"({ast.unparse(operand)})"
        case ast.BoolOp(op=operator):
            yield "condition", f"({changed(op=OPPOSITES[type(operator)]())})"
        case ast.IfExp(body=body, orelse=orelse):
            yield "condition", f"({changed(body=orelse, orelse=body)})"
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            end: Any = upper or lower
            moved = ast.BinOp(left=end, op=ast.Add(), right=ast.Constant(value=1))
            yield "bound", changed(**{"upper" if upper else "lower": moved})
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)) if value < 1000:
            yield "constant", f"({value + 1})"
        case ast.If(body=[ast.Raise() | ast.Return() | ast.Continue()], orelse=[]):
            yield "check", changed(test=ast.Constant(value=False))
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if "check" in name:
            yield "check", "pass"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in OPPOSITE_CALLS:
            function = re.sub(r"\w+$", OPPOSITE_CALLS[name], ast.unparse(node.func))
            yield "operator", changed(func=ast.Name(id=function))
        case ast.Call(args=[first, second]):
            if not any(isinstance(each, ast.Starred | ast.Constant) for each in (first, second)):
                yield "arguments", changed(args=[second, first])


def package_files(root: Path) -> list[str]:
    """Return the files of the package that are mutated, from the root."""
    found = (path.relative_to(root).as_posix() for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return sorted(path for path in found if not re.search(NOT_MUTATED, path))


def planted(mutant: Mutant, root: Path) -> tuple[Path, str] | None:
    """Return the file that a mutant changes, and its text with it; None if its code is gone."""
    key = mutant.function, mutant.kind, mutant.before, mutant.after
    places: list[tuple[Path, str, Any]] = []
    for path in dict.fromkeys(root / file for file in (mutant.file, *package_files(root))):
        source = path.read_text() if path.is_file() else ""
        found = [(path, source, node) for node, *site in sites(source) if tuple(site) == key]
        if path == root / mutant.file and len(found) > mutant.nth:
            places = [found[mutant.nth]]
            break
        places += found
    if len(places) != 1:
        return None
    ((path, source, node),) = places
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    after = mutant.after.replace("\n", "\n" + " " * node.col_offset)
    return path, source[:start] + after + source[start + len(mutant.before) :]


@app.command()
def draw(seed: int = 0, count: int = 400) -> None:
    """Draw mutants and write the list, without results: all kinds about alike, twice as many in sensitive rooms."""
    generator, weighted, same = random.Random(seed), [], Counter[tuple[str, ...]]()
    for file in package_files(ROOT):
        source = (ROOT / file).read_text()
        found = [*sites(source)] if source.isascii() else []
        kinds = Counter(kind for _, _, kind, _, _ in found)
        for node, function, kind, before, after in found:
            key = (file, function, kind, before, after)
            mutant = Mutant("", file, node.lineno, function, kind, before, after, same[key])
            same[key] += 1
            weight = (1 + any(part in file for part in SENSITIVE)) / kinds[kind] ** 0.5
            weighted.append((generator.random() ** (1 / weight), mutant))
    chosen = sorted(mutant for _, mutant in sorted(weighted, reverse=True)[:count])
    text = "# Written by scripts/mutants.py, which says what it means.\nmutants = [\n"
    for number, mutant in enumerate(chosen):
        entries = mutant._replace(name=f"m{number:03}")._asdict()
        text += f"  {{{', '.join(f'{key} = {json.dumps(value)}' for key, value in entries.items())}}},\n"
    LIST.write_text(f"{text}]\n\n[results]\n")


def read(path: Path) -> tuple[list[Mutant], dict[str, str]]:
    """Return the mutants of a file, if it lists them, and what became of each by name."""
    parsed = tomllib.loads(path.read_text()) if path.exists() else {}
    return [Mutant(**entry) for entry in parsed.get("mutants", [])], parsed.get("results", {})


def stages(file: str, killer: str) -> Iterator[list[str]]:
    """Yield the tests for a mutant of a file, stage after stage; nothing is run twice."""
    path, done = Path(file), []
    mirror, folder = Path("tests") / path.parent / f"test_{path.name}", Path("tests") / path.parent
    for test in dict.fromkeys((killer, mirror.as_posix())):
        if (ROOT / test).is_file():
            done.append(f"--ignore={test}")
            yield [test]
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    yield [str(folder), *done, "-m", LIGHT]
    if (ROOT / "tests/errors").is_dir():  # mistakes in all parts of the package
        yield ["tests/errors", *done]
    if path.parts[0] not in ("preprocess", "cli") and (ROOT / "tests/laws").is_dir():  # laws of reading and balancing
        yield ["tests/laws", *done]
    if len(folder.parts) > 2:
        yield [f"tests/{path.parts[0]}", f"--ignore={folder}", *done, "-m", LIGHT]
    yield [str(folder), *done, "-m", HEAVY]


def first_failing(checkout: Path, tests: Sequence[str], limits: Sequence[int]) -> str | None:
    """Return the first test that fails or takes too long; None if there is none until the second limit, in seconds."""
    options = ["-x", "-vv", "-n", "0", "--tb=no", "--timeout", str(limits[0]), "--timeout-method=thread"]
    command: Any = [sys.executable, "-P", "-m", "pytest", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(checkout / "typings"), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as file:
        output: Any = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, cwd=checkout, env=environment, **output)
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limits[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has left
        process.wait()
        file.seek(0)
        printed = file.read()
    failed = re.findall(f"^(?:ERROR |FAILED )?{TEST}", printed, re.MULTILINE) or [START]
    is_passed = code in (0, 5) or (code is None and " PASSED" in printed)  # 5: nothing was collected
    return None if is_passed else failed[-1]


def judge(mutant: Mutant, checkout: Path, killer: str, sound: dict[str, bool], limits: Sequence[int]) -> str:
    """Plant a mutant in a checkout, run the tests, and return the file of the one that failed, or what became of it."""
    if (found := planted(mutant, checkout)) is None:
        return GONE
    (path, text), broken = found, {test for test in sound if not sound[test]}
    original = path.read_text()

    def fails(*tests: str) -> str | None:
        left_out = [f"--{'deselect' if '::' in test else 'ignore'}={test}" for test in sorted(broken)]
        path.write_text(text)
        try:
            return first_failing(checkout, [*tests, *left_out], limits)
        finally:
            path.write_text(original)

    for tests in stages(path.relative_to(checkout).as_posix(), killer):
        while tests[0] not in broken and (failed := fails(*tests)) is not None:
            if failed not in sound:  # it may fail without the mutant too, on this machine
                sound[failed] = failed == START or first_failing(checkout, [failed], limits) is None
            if sound[failed] and fails(failed if failed != START else tests[0]) is not None:
                return failed.split("::")[0]
            broken.add(failed)
    return SURVIVED


@app.command()
def run(only: str = "", jobs: int = 1, into: Into = LIST, baseline: Baseline = None, limits: Limits = SLOW) -> None:
    """Run the mutants that have no result, in files that begin with `only`, and append what became of each."""
    mutants, known = read(LIST)
    results, sound = read(into)[1], dict[str, bool]()
    for outcome, test in re.findall(f"(PASSED|FAILED|ERROR) {TEST}", baseline.read_text() if baseline else ""):
        sound[test] = sound.get(test, True) and outcome == "PASSED"
    into.exists() or into.write_text("[results]\n")
    chosen = [each for each in mutants if each.file.startswith(only) and each.name not in results]
    chosen.sort(key=lambda one: (not any(part in one.file for part in SENSITIVE), "/" in known.get(one.name, "")))
    checkouts, lock, cores = SimpleQueue[Path](), Lock(), itertools.cycle(sorted(os.sched_getaffinity(0)))
    # Two cores for each: what counts them would start processes on all.
    pool = ThreadPoolExecutor(jobs, initializer=lambda: os.sched_setaffinity(0, {next(cores), next(cores)}))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, pool:
        for number in range(jobs):
            checkouts.put(copy := Path(folder) / str(number) / "evenrank")
            tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
            copy.mkdir(parents=True)
            subprocess.run(["cp", "-dp", "--parents", *tracked.decode().split("\0")[:-1], copy], cwd=ROOT, check=True)

        def run_one(mutant: Mutant) -> None:
            checkout = checkouts.get()
            result = judge(mutant, checkout, known.get(mutant.name, SURVIVED), sound, limits)
            checkouts.put(checkout)
            with lock, into.open("a") as file:
                file.write(f"{mutant.name} = {json.dumps(result)}\n")
            print(f"{mutant.name} {mutant.file}:{mutant.line} {result}", flush=True)

        list(pool.map(run_one, chosen))


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A file of results.")] = LIST) -> None:
    """Print how many mutants were killed, by folder and kind, and the others, with what killed them in the list."""
    (mutants, known), results = read(LIST), read(file)[1]
    groups: dict[str, list[bool]] = {}
    for each in (each for each in mutants if results.get(each.name, GONE) != GONE):
        for group in (each.file.split("/")[0], each.kind, "all"):
            groups.setdefault(group, []).append(results[each.name] != SURVIVED)
    for group, killed in groups.items():
        print(f"{group:12} {sum(killed):4} of {len(killed):4} killed")
    for each in mutants:
        if (result := results.get(each.name)) in (SURVIVED, GONE):
            before = f" (was: {known[each.name]})" if known.get(each.name, result) != result else ""
            print(f"{each.name} {result}{before} {each.file}:{each.line} {each.before!r} -> {each.after!r}")


if __name__ == "__main__":
    app()
