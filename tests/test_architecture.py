"""The floors of the house, held by reading the sources: which room may import what, and how large its files may be."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import orthojax

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "orthojax"
FLOORS = {
    "errors": -2,  # the ground: the standard library alone
    "fields": -1,
    "ops": 0,
    "config": 0,
    "progress": 0,
    "files": 0,
    "formatting": 0,
    "machine": 0,
    "timing": 0,
    "optim": 1,
    "model": 1,
    "data": 1,
    "analysis": 2,
    "quant": 2,
    "train": 3,
    "experiments": 4,
    "benchmarks": 4,
    "cli": 5,
    "launch": 6,  # the scripts, on top of what command lines share
}
NEVER = {
    "ops": {"flax", "optax", "orbax"},
    "optim": {"flax", "model", "config"},
    "model": {"optax", "data", "train"},
    "data": {"flax", "optax", "model"},
    "analysis": {"optax", "data", "train"},
    "quant": {"optax", "data", "train"},
    "train": {"launch", "experiments"},
    "experiments": {"launch"},
    "benchmarks": {"launch", "experiments"},
}
ONLY = {
    "errors": set(),
    "fields": set(),
    "config": set(),
    "progress": {"tqdm"},
    "files": set(),
    "formatting": set(),
}  # what else than the standard library and what lies below these may import
SOURCES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "launch").glob("*.py")])
IDS = [str(path.relative_to(ROOT)) for path in SOURCES]

LONGEST_FILE, LONGEST_FUNCTION = 300, 60
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS = {"orthojax/config/model.py:ModelConfig.__post_init__": 70}


def _room(path: Path) -> str:
    if not path.is_relative_to(PACKAGE):
        return "launch"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _name_of_module(path: Path) -> list[str]:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return parts if path.name == "__init__.py" else parts[:-1]  # the package that relative imports start from


def imports(tree: ast.AST, package: list[str]) -> set[str]:
    """Every module that a file imports anywhere, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from orthojax import optim` and `from orthojax.ops import x` both name the room in their first two parts.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "orthojax" else {module}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


def _imports(path: Path) -> set[str]:
    package = _name_of_module(path)
    package = package[:-1] if path.name == "__init__.py" else package
    return imports(ast.parse(path.read_text(encoding="utf-8")), package)


PUBLIC_HOME = {**orthojax._HOME, "__version__": None}


def rooms_of(modules: set[str]) -> set[str]:
    """The rooms of orthojax among imported modules; `from orthojax import kurtosis` is an import of ops."""
    names = {module.split(".")[1] for module in modules if module.startswith("orthojax.")}
    return {PUBLIC_HOME.get(name, name) for name in names} - {None}


def libraries_of(modules: set[str]) -> set[str]:
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
    assert libraries_of(found) == {"flax", "optax", "tensorflow"}
    assert rooms_of(found) == {"data", "ops", "train", "quant", "model"}


def test_every_room_has_a_floor():
    assert {_room(path) for path in SOURCES} - {"__init__"} <= set(FLOORS)
    assert len(SOURCES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_a_room_imports_only_from_floors_below_or_itself(path):
    room = _room(path)
    if room == "__init__":
        return  # the front door names every room, lazily: see the subprocess tests
    for other in rooms_of(_imports(path)):
        assert other == room or FLOORS[other] < FLOORS[room], f"{path} imports {other}"


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_a_room_never_imports_what_its_line_of_the_table_forbids(path):
    modules = _imports(path)
    assert not (rooms_of(modules) | libraries_of(modules)) & NEVER.get(_room(path), set())


@pytest.mark.parametrize("room", ONLY)
def test_the_ground_floor_needs_the_standard_library_only(room):
    paths = [path for path in SOURCES if _room(path) == room]
    assert paths
    for modules in map(_imports, paths):
        assert libraries_of(modules) - set(sys.stdlib_module_names) <= ONLY[room]
        assert rooms_of(modules) <= {"errors", "fields", room}


def test_heavy_libraries_have_one_door_each():
    users: dict[str, set[str]] = {}
    for path, name in zip(SOURCES, IDS, strict=True):
        for library in libraries_of(_imports(path)):
            users.setdefault(library, set()).add(name)
    assert {Path(name).parts[1] for name in users["flax"]} == {"model"}
    assert all(name.startswith("orthojax/train/checkpoint/") for name in users["orbax"])
    assert "tensorflow" not in users
    tfds = users.get("tensorflow_datasets", set())
    assert len(tfds) <= 1
    assert all(name.startswith("orthojax/data/") for name in tfds)


# What imports really pull in, in a process of its own.


def _python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


BLOCKER = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked!r}:
                raise ModuleNotFoundError("blocked: " + name)

    sys.meta_path.insert(0, Blocker())
"""


def test_the_optimizer_and_the_attention_work_without_flax_orbax_and_tfds():
    blocked = {"flax", "orbax", "tensorflow_datasets", "tensorflow", "grain", "tokenizers", "matplotlib"}
    code = (
        BLOCKER.format(blocked=blocked)
        + """
    import orthojax
    import orthojax.optim
    import jax.numpy as jnp
    optimizer = orthojax.orthoadam(1e-3)
    params = {"w": jnp.ones((4, 4))}
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert orthojax.gpt2("130m").d_model == 768
    q = jnp.ones((1, 2, 1, 4))
    print(updates["w"].shape, orthojax.dot_product_attention(q, q, q).shape)
    try:
        orthojax.Transformer
    except ModuleNotFoundError as error:
        print(error)
    """
    )
    assert _python(code).split("\n")[:2] == ["(4, 4) (1, 2, 1, 4)", "blocked: flax"]


def test_flags_are_parsed_before_jax_is_imported():
    code = """
    import sys
    import orthojax, orthojax.cli, orthojax.config
    heavy = {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "tensorflow_datasets", "tensorflow", "matplotlib"}
    print(sorted(heavy & set(sys.modules)))
    """
    assert _python(code) == "[]\n"


# The front door.

PUBLIC = [
    "softmax1",
    "attention_fn",
    "dot_product_attention",
    "kurtosis",
    "Rotation",
    "rotate",
    "unrotate",
    "scale_by_orthoadam",
    "in_rotated_basis",
    "orthoadam",
    "ModelConfig",
    "Transformer",
    "gpt2",
    "llama2",
    "analysis",
    "quant",
    "optim",
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_stands_at_the_front_door(name):
    assert name in orthojax.__all__
    assert name in dir(orthojax)
    value = getattr(orthojax, name)
    assert value.__doc__
    if name in orthojax._HOME:
        assert value is getattr(importlib.import_module(f"orthojax.{orthojax._HOME[name]}"), name)


def test_all_names_nothing_else_and_unknown_names_are_refused():
    assert set(orthojax.__all__) - {"__version__"} == set(PUBLIC)
    with pytest.raises(AttributeError, match="softmax2"):
        orthojax.softmax2  # noqa: B018


@pytest.mark.parametrize("room", ["ops", "optim", "model", "data", "analysis", "quant", "train"])
def test_a_room_keeps_what_its_all_promises(room):
    module = importlib.import_module(f"orthojax.{room}")
    for name in getattr(module, "__all__", []):
        assert getattr(module, name) is not None


# Sizes.


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_files_are_short(path):
    name = str(path.relative_to(ROOT))
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGER_FILES.get(name, LONGEST_FILE)


def _functions(node: ast.AST, prefix: str = ""):
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        inner = f"{name}." if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else prefix
        yield from _functions(child, inner)


def _length_without_docstring(function: ast.FunctionDef) -> int:
    documented = ast.get_docstring(function) is not None
    doc = function.body[0] if documented else None
    return function.end_lineno - function.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)


@pytest.mark.parametrize("path", SOURCES, ids=IDS)
def test_functions_are_short(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, function in _functions(tree):
        allowed = LONGER_FUNCTIONS.get(f"{path.relative_to(ROOT)}:{name}", LONGEST_FUNCTION)
        assert _length_without_docstring(function) < allowed, f"{path}:{name}"
