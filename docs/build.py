"""Builds the site, or serves it while it is written: python docs/build.py [serve]. Needs the extra `docs`.

The pages are README.md, docs/, CONTRIBUTING.md, CHANGELOG.md and results/, where they stand, so that their links hold
in a clone and in the site alike; they are copied to build/pages, where pages of the API are added, and the site is
written to build/site. Every warning is an error.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build/pages"
COPIED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "constraints.txt")
FOLDERS = ("docs", "results", "examples", "configs", "notebooks")
PACKAGES = {
    "orthojax": "The names of orthojax itself",
    "orthojax.ops": "Functions on arrays",
    "orthojax.optim": "The optimizer",
    "orthojax.model": "Models",
    "orthojax.analysis": "Measurements",
    "orthojax.quant": "Quantisation",
    "orthojax.data": "Data",
    "orthojax.train": "Training",
    "orthojax.cards": "Cards of models",
    "orthojax.config": "Configs",
    "orthojax.pretrained": "Pretrained models",
}


def public_names(package: str) -> dict[str, str]:
    """Returns the names that a package exports or a module defines, and where each is defined."""
    path = ROOT / package.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree, found = ast.parse(source.read_text(encoding="utf-8")), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            found |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    if not path.is_dir():
        own = (n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_")
        found = {name: f"{package}.{name}" for name in own}
    return {name: home for name, home in found.items() if name[0] != "_"}


def defined_in(home: str) -> str:
    """Follows `from x import y` of packages to the module that defines a name; '' where it is a module."""
    module, _, name = home.rpartition(".")
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == name for a in node.names):
            if f"{node.module}.{name}" == home:  # from package import module
                return ""
            return defined_in(f"{node.module}.{name}")
    return "" if (path / name).is_dir() or (path / f"{name}.py").is_file() else home


def count_uses() -> Counter[str]:
    """Counts names in the guides, examples and commands: what users meet most comes first on a page of the API."""
    texts = [ROOT / "README.md"]
    for folder, pattern in (
        ("docs", "*.md"),
        ("examples", "*.py"),
        ("notebooks", "*.ipynb"),
        ("orthojax/commands", "*.py"),
    ):
        texts += (ROOT / folder).glob(pattern)
    words = (
        word for path in texts for word in re.findall(r"(?<=[a-z]\.)\w+|\w+(?=\()", path.read_text(encoding="utf-8"))
    )
    return Counter(words)


def write_api() -> None:
    """Writes a page for each package: its docstring, then what it exports, by use."""
    uses = count_uses()
    folder = PAGES / "docs/api"
    folder.mkdir(parents=True, exist_ok=True)
    for package, title in PACKAGES.items():
        lines = [f"# {title}", "", f"::: {package}", "    options:", "      members: false", ""]
        homes = {name: defined_in(home) for name, home in public_names(package).items()}
        homes = {name: home for name, home in homes.items() if ".".join(home.split(".")[:2]) in PACKAGES}
        if package == "orthojax":  # their docstrings are on the pages of their packages
            lines += ["| name | defined in |", "|---|---|"]
        for name, home in sorted(homes.items(), key=lambda item: (-uses[item[0]], item[0].lower())):
            of = ".".join(home.split(".")[:2])
            if package == "orthojax":
                lines.append(f"| [`orthojax.{name}`]({of.split('.')[1]}.md#{home}) | `{of}` |")
            else:  # under the name that users import
                label = [f"      heading: {package}.{name}", f"      toc_label: {name}"]
                lines += [f"::: {home}", "    options:", *label, ""]
        (folder / f"{package.split('.')[-1]}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def leave_out_missing_pictures() -> None:
    """Removes pictures from the copied reports that are not kept in the repository."""
    for report in (PAGES / "results").rglob("report.md"):
        text = report.read_text(encoding="utf-8")
        for picture, path in re.findall(r"(!\[[^]]*\]\(([^)]+)\))", text):
            if not (report.parent / path).exists():
                text = text.replace(picture, "")
        report.write_text(text, encoding="utf-8")


def main() -> int:
    """Copies the pages, adds the API and runs MkDocs."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, PAGES / name)
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                PAGES / name,
                ignore=shutil.ignore_patterns("__pycache__", "extensions", "build.py", "report.html"),
            )
    leave_out_missing_pictures()
    write_api()
    serving = sys.argv[1:] == ["serve"]
    paths = os.pathsep.join(filter(None, [str(ROOT / "docs/extensions"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "mkdocs", *(["serve"] if serving else ["build", "--strict", "--clean"])]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
