"""The layers of the project, held by reading the sources: which package may import what, and how large files may be."""

import ast
import functools
import importlib
import sys
import textwrap
from collections.abc import Set
from pathlib import Path

import pytest

import orthojax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "orthojax"
LAYERS = {
    "errors": -1,  # the standard library alone
    **dict.fromkeys(("ops", "config", "files", "formatting", "machine", "progress", "timing"), 0),
    **dict.fromkeys(("gguf_reader", "published"), 0.5),
    "optim": 1,
    "model": 1,
    "data": 1,
    "analysis": 2,
    "quant": 2,
    "generation": 2,
    "train": 3,
    "experiments": 4,
    "benchmarks": 4,
    "commands": 5,
    **dict.fromkeys(("__main__", "launch"), 6),  # what starts them
}
NEVER = {
    "ops": {"flax", "optax", "orbax"},
    "optim": {"flax", "model", "config"},
    "model": {"optax", "data", "train"},
    "data": {"flax", "optax", "model"},
    "analysis": {"optax", "data", "train"},
    "quant": {"optax", "data", "train"},
    "benchmarks": {"experiments"},
}
# What these may import besides the standard library and the bottom layers.
ONLY = {"errors": set(), "config": set(), "files": set(), "formatting": set(), "progress": {"tqdm"}}
SOURCES = {
    str(path.relative_to(ROOT)): path for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launch").glob("*.py")])
}
PUBLIC_HOME = {**orthojax._HOME, "__version__": None}
LONGEST_FILE, LONGEST_FUNCTION = 500, 60
LONGER_FUNCTIONS = {"orthojax/config/model.py:ModelConfig.__post_init__": 70}


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else "launch"


def imports(tree: ast.AST, package: list[str]) -> set[str]:
    """Every module that a file imports anywhere, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from orthojax import optim` and `from orthojax.ops import x`: the first two parts name the package.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "orthojax" else {module}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imports(parsed(path), list(path.relative_to(ROOT).parts[:-1])))


def packages_in(modules: Set[str]) -> set[str]:
    """The packages of orthojax among imported modules; `from orthojax import kurtosis` is an import of ops."""
    names = {module.split(".")[1] for module in modules if module.startswith("orthojax.")}
    return {PUBLIC_HOME.get(name, name) for name in names} - {None}


def libraries_in(modules: Set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} - {"orthojax"}


def test_the_reader_of_imports_sees_every_form_of_import():
    source = """
    import flax.linen as nn
    from orthojax import data, kurtosis
    from orthojax.train.step import x
    from . import sibling
    from .. import model
    def f():
        import optax
        importlib.import_module("tensorflow")
    """
    found = imports(ast.parse(textwrap.dedent(source)), ["orthojax", "quant"])
    assert libraries_in(found) == {"flax", "optax", "tensorflow"}
    assert packages_in(found) == {"data", "ops", "train", "quant", "model"}


def test_packages_import_only_from_layers_below():
    assert len(SOURCES) > 30
    assert {package_of(path) for path in SOURCES.values()} - {"__init__"} <= set(LAYERS)
    for name, path in SOURCES.items():
        package, modules = package_of(path), imports_of(path)
        if package == "__init__":
            continue  # it names every package, lazily: see the subprocess tests
        packages, libraries = packages_in(modules), libraries_in(modules)
        for other in packages - {package}:
            assert LAYERS[other] < LAYERS[package], f"{name} imports {other}"
        assert not (packages | libraries) & NEVER.get(package, set()), name
        if package in ONLY:
            assert libraries - set(sys.stdlib_module_names) <= ONLY[package], name
            assert packages <= {"errors", package}, name


def test_heavy_libraries_have_one_door_each():
    users: dict[str, set[str]] = {}
    for name, path in SOURCES.items():
        for library in libraries_in(imports_of(path)):
            users.setdefault(library, set()).add(name)
    # The benchmark compares with flax's own layers.
    assert all(name.startswith("orthojax/model/") for name in users["flax"] - {"orthojax/benchmarks/plain_flax.py"})
    assert all(name.startswith("orthojax/train/checkpoint/") for name in users["orbax"])
    assert "tensorflow" not in users
    # The benchmark writes folders of TFDS, to time how they are read.
    assert users["tensorflow_datasets"] == {"orthojax/data/tfds.py", "orthojax/benchmarks/data.py"}


# The public names.

PUBLIC = set(
    """softmax1 attention_fn dot_product_attention kurtosis Rotation rotate unrotate scale_by_orthoadam in_rotated_basis
    orthoadam ModelConfig Transformer Interventions LoadedModel load gpt2 llama2 analysis quant optim""".split()
)


def test_every_public_name_is_exported_documented_and_nothing_else():
    assert set(orthojax.__all__) - {"__version__"} == PUBLIC <= set(dir(orthojax))
    for name in PUBLIC:
        value = getattr(orthojax, name)
        assert value.__doc__, name
        if name in orthojax._HOME:
            assert value is getattr(importlib.import_module(f"orthojax.{orthojax._HOME[name]}"), name), name
    with pytest.raises(AttributeError, match="softmax2"):
        orthojax.softmax2  # noqa: B018


def test_every_package_has_what_its_all_promises():
    for package in {package_of(path) for path in SOURCES.values()} - {"__init__", "launch"}:
        module = importlib.import_module(f"orthojax.{package}")
        for name in getattr(module, "__all__", []):
            assert getattr(module, name) is not None, f"{package}.{name}"


# Sizes.


def functions_in(node: ast.AST, prefix: str = ""):
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{getattr(child, 'name', '')}"
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function:
            yield name, child
        yield from functions_in(child, f"{name}." if is_function or isinstance(child, ast.ClassDef) else prefix)


def length_without_docstring(function: ast.FunctionDef) -> int:
    doc = function.body[0] if ast.get_docstring(function) is not None else None
    return function.end_lineno - function.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)


def test_files_and_functions_are_short():
    for name, path in SOURCES.items():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < LONGEST_FILE, name
        for function, node in functions_in(parsed(path)):
            allowed = LONGER_FUNCTIONS.get(f"{name}:{function}", LONGEST_FUNCTION)
            assert length_without_docstring(node) < allowed, f"{name}:{function}"
