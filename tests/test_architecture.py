"""The layers of the project, held by reading the sources: what a package may import, no circles, short functions."""

import ast
import functools
import graphlib
import sys
import textwrap
from collections.abc import Set
from pathlib import Path

import pytest

import orthojax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "orthojax"
LAYERS = {
    **{"errors": -3, "files": -2, "stores": -1},  # the standard library alone, but etils in stores
    **dict.fromkeys(("ops", "config", "formatting", "machine", "places"), 0),
    **dict.fromkeys(("optim", "model", "data"), 1),
    **dict.fromkeys(("pretrained", "analysis", "quant", "report"), 2),
    **dict.fromkeys(("train", "cards"), 3),
    "experiments": 4,
    "commands": 5,
    **dict.fromkeys(("__main__", "launch"), 6),  # what starts them
}
BESIDE = {("report", "analysis"), ("cards", "train")}  # the first may import the second, of the same layer
NEVER = {
    "ops": {"flax", "optax", "orbax"},
    "optim": {"flax", "model", "config"},
    "model": {"optax", "data", "train"},
    "data": {"flax", "optax", "model"},
    "pretrained": {"optax", "train"},
    "analysis": {"optax", "data", "train"},
    "quant": {"optax", "data", "train"},
}
# What these may import besides the standard library.
ONLY = {"errors": "", "config": "errors", "files": "errors", "formatting": "errors", "places": "errors files stores"}
SOURCES = {
    str(path.relative_to(ROOT)): path for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launch").glob("*.py")])
}
LONGEST_FUNCTION = 60


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else "launch"


@functools.cache
def home_of(name: str) -> str:
    """The package of a name that is imported from `orthojax` itself, such as `orthojax.model` of `gpt2`."""
    if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file():
        return f"orthojax.{name}"
    return ".".join(getattr(getattr(orthojax, name), "__module__", "orthojax").split(".")[:2])


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST, package: list[str]) -> set[str]:
    """Every module that a file imports anywhere, also inside functions and under TYPE_CHECKING.

    `from x import y` is an import of x.y if that is a module of ours, else of x.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [alias.name for alias in node.names]
            if module == "orthojax":
                found |= {home_of(name) for name in names}
            else:
                folder = ROOT / module.replace(".", "/")
                inside = {name for name in names if (folder / f"{name}.py").is_file() or (folder / name).is_dir()}
                found |= {f"{module}.{name}" for name in inside} | ({module} if set(names) - inside else set())
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imports(parsed(path), list(path.relative_to(ROOT).parts[:-1])))


def packages_in(modules: Set[str]) -> set[str]:
    return {module.split(".")[1] for module in modules if module.startswith("orthojax.")}


def libraries_in(modules: Set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} - {"orthojax"}


def test_packages_import_only_from_layers_below():
    assert len(SOURCES) > 30
    assert {package_of(path) for path in SOURCES.values()} - {"__init__"} <= set(LAYERS)
    for name, path in SOURCES.items():
        package, modules = package_of(path), imports_of(path)
        if package == "__init__":
            continue  # it names every package, lazily: see the subprocess tests
        packages, libraries = packages_in(modules), libraries_in(modules)
        for other in packages - {package}:
            assert LAYERS[other] < LAYERS[package] or (package, other) in BESIDE, f"{name} imports {other}"
        assert not (packages | libraries) & NEVER.get(package, set()), name
        if package in ONLY:
            assert not libraries - set(sys.stdlib_module_names), name
            assert packages <= {*ONLY[package].split(), package}, name


def test_no_modules_import_each_other_in_a_circle():
    """Lazy imports and those for types count; `orthojax/__init__.py`, which names every package lazily, does not."""
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in SOURCES.values()}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {name: imports_of(path) & modules.keys() for name, path in modules.items() if name != "orthojax"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_heavy_libraries_have_one_door_each():
    users: dict[str, set[str]] = {}
    for name, path in SOURCES.items():
        for library in libraries_in(imports_of(path)):
            users.setdefault(library, set()).add(name)
    assert all(name.startswith("orthojax/model/") for name in users["flax"])
    assert all(name == "orthojax/train/checkpoint.py" for name in users["orbax"])
    assert "tensorflow" not in users
    assert len(users.get("tensorflow_datasets", ())) <= 1


PUBLIC = set(
    """softmax1 attention_fn dot_product_attention kurtosis Rotation rotate unrotate scale_by_orthoadam in_rotated_basis
    orthoadam muon_orthoadam ModelConfig Transformer Interventions LoadedModel card load gpt2 llama2 analysis quant
    optim""".split()
)


def test_public_names_are_exported_and_documented():
    assert set(orthojax.__all__) == PUBLIC <= set(dir(orthojax))
    for name in PUBLIC:
        assert getattr(orthojax, name).__doc__, name
    with pytest.raises(AttributeError, match="softmax2"):
        orthojax.softmax2  # noqa: B018


def test_functions_are_short():
    for name, path in SOURCES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = node.body[0] if ast.get_docstring(node) is not None else None
                lines = node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)
                assert lines < LONGEST_FUNCTION, f"{name}:{node.name}"


def test_every_form_of_import_is_seen():
    source = """
    import flax.linen as nn
    from orthojax import data, kurtosis
    from orthojax.train import step
    from . import sibling
    from .. import model
    def f():
        import optax
        importlib.import_module("tensorflow")
    """
    found = imports(ast.parse(textwrap.dedent(source)), ["orthojax", "quant"])
    assert libraries_in(found) == {"flax", "optax", "tensorflow"}
    assert packages_in(found) == {"data", "ops", "train", "quant", "model"}
    assert "orthojax.train.step" in found
