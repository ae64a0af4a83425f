"""Fails when a module or a function is too long, or a module has no test file.

Small parts are a rule of this project: at most 400 lines a module and 70 lines a function, in the
product and in its tests. And a module is tested where a reader looks first: ``kvworker/core/x.py``
in ``tests/kvworker/core/test_x.py``. Only modules with code count: those in which some function
has a body beyond its docstring.

    python tools/check_sizes.py [repository root]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 70

#: Folder of each package, and the folder that mirrors it.
PACKAGES = {
    "common/kvcommon": "tests/kvcommon",
    "kvsched": "tests/kvsched",
    "kvworker": "tests/kvworker",
    "tools/kvreplay": "tests/kvreplay",
}

#: Folders whose files must be small.
SIZED = ("common", "kvsched", "kvworker", "tools", "tests", "benchmarks")

#: Modules without a mirror test file, and why that is right.
NO_MIRROR = {
    "kvworker/devices/acl.py": "a driver; tests/npu and tests/conformance/devices run it",
    "kvworker/devices/cuda.py": "needs a card; tests/conformance/devices runs it on one",
    "kvworker/devices/cudart.py": "a driver; tests/conformance/devices runs it on a CUDA machine",
    "kvworker/devices/npu.py": "needs torch_npu; tests/npu and tests/conformance/devices run it",
    "kvworker/devices/torch_device.py": "needs a card; tests/conformance/devices is its suite",
    "kvworker/doctor/card.py": "opens a card; tests/npu/test_doctor.py",
    "kvworker/doctor/probe.py": "needs a card; tests/npu/test_doctor.py",
    "kvworker/stores/base.py": "an interface; its conformance suite tests every implementation",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Complaint(NamedTuple):
    """One thing to change."""

    where: str
    what: str


def functions(tree: ast.Module) -> Iterator[Function]:
    """Yield every function and method of a module, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def has_body(function: Function) -> bool:
    """Say whether a function does anything: more than a docstring, ``...`` or ``pass``."""
    return any(
        not isinstance(node, ast.Pass)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def num_lines(function: Function) -> int:
    """Lines from ``def`` to the last one, decorators not counted."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def size_complaints(where: str, text: str) -> Iterator[Complaint]:
    """Yield what is too long in one module."""
    lines = len(text.splitlines())
    if lines > MAX_MODULE_LINES:
        yield Complaint(where, f"{lines} lines, more than {MAX_MODULE_LINES}")
    for function in functions(ast.parse(text)):
        length = num_lines(function)
        if length > MAX_FUNCTION_LINES:
            yield Complaint(
                f"{where}:{function.lineno}",
                f"{function.name} has {length} lines, more than {MAX_FUNCTION_LINES}",
            )


def mirror_of(module: Path) -> Path:
    """Name the test file of a module, both relative to the package's folder and its mirror.

    A package's own code (``__init__.py``) is tested beside it, under the package's name.
    """
    if module.name == "__init__.py":
        name = "test_init.py" if module.parent == Path() else f"test_{module.parent.name}.py"
        return module.parent.parent / name
    return module.with_name(f"test_{module.stem.strip('_')}.py")


def mirror_complaints(root: Path) -> Iterator[Complaint]:
    """Yield modules with code but without test file, and exemptions that exempt nothing."""
    exempt = set(NO_MIRROR)
    for package, mirror in PACKAGES.items():
        for path in sorted((root / package).rglob("*.py")):
            where = path.relative_to(root).as_posix()
            if not any(has_body(node) for node in functions(ast.parse(path.read_text("utf-8")))):
                continue
            test = root / mirror / mirror_of(path.relative_to(root / package))
            if where in exempt:
                exempt.discard(where)
            elif not test.is_file():
                yield Complaint(where, f"has no {test.relative_to(root).as_posix()}")
    for where in sorted(exempt):
        yield Complaint(where, "is exempted from having a test file, but needs no exemption")


def complaints(root: Path) -> Iterator[Complaint]:
    """Yield all complaints about a repository."""
    for folder in SIZED:
        for path in sorted((root / folder).rglob("*.py")):
            yield from size_complaints(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    yield from mirror_complaints(root)


def main(arguments: list[str]) -> int:
    """Print complaints; return the exit status."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found = list(complaints(root))
    for complaint in found:
        print(f"{complaint.where}: {complaint.what}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
