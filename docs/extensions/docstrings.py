"""What Markdown does not know: equations and examples of docstrings, and words of code that stay whole.

Equations become MathML when the site is built, so that it has no script, no font and no network for them: `$x$` and
`$$x$$` of pages, :math:`x` and `.. math::` with an indented block of docstrings. Lines from `>>>` to an empty one
become code.
"""

import html
import re
import textwrap
from xml.etree.ElementTree import Element, SubElement

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor
from markdown.util import AtomicString

_DIRECTIVE = re.compile(r"^( *)\.\. math::\s*$")


def mathml(latex: str, display: str) -> str:
    """An equation as <math>, with its LaTeX as the text that is copied and read out."""
    latex = latex.strip().removesuffix(r"\\").strip()
    if "&" in latex or r"\\" in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    return convert(latex, display=display).replace("<math ", f'<math aria-label="{html.escape(latex)}" ', 1)


class _Blocks(Preprocessor):
    """Display equations, before anything else reads their backslashes and underscores; code is left alone."""

    def run(self, lines: list[str]) -> list[str]:
        out, at, fence = [], 0, ""
        while at < len(lines):
            line = lines[at]
            mark = re.match(r" *(```+|~~~+)", line)
            if mark:
                fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
            directive = None if fence else _DIRECTIVE.match(line)
            if directive:
                block, at = self._indented(lines, at + 1, len(directive[1]))
                out += ["", self._stash("\n".join(block)), ""]
            elif not fence and line.strip().startswith("$$"):
                text = line.strip().removeprefix("$$")
                while "$$" not in text:
                    at += 1
                    text += "\n" + lines[at]
                out += ["", self._stash(text.partition("$$")[0]), ""]
                at += 1
            else:
                out.append(line)
                at += 1
        return out

    def _indented(self, lines: list[str], at: int, depth: int) -> tuple[list[str], int]:
        block = []
        while at < len(lines) and (not lines[at].strip() or len(lines[at]) - len(lines[at].lstrip()) > depth):
            block.append(lines[at])
            at += 1
        return textwrap.dedent("\n".join(block)).strip().split("\n"), at

    def _stash(self, latex: str) -> str:
        return self.md.htmlStash.store(f'<div class="equation">{mathml(latex, "block")}</div>')


class _Examples(Preprocessor):
    """`>>>` lines outside of fences become fenced code, links of reStructuredText those of Markdown."""

    def run(self, lines: list[str]) -> list[str]:
        out, fenced, within = [], False, False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            if not fenced and not within and line.lstrip().startswith(">>> "):
                out += ["", line[: len(line) - len(line.lstrip())] + "```pycon"]
                within = True
            elif within and not line.strip():
                out.append("```")
                within = False
            out.append(line if fenced or within else re.sub(r"`([^`<]+) <(https?:[^>]+)>`_+", r"[\1](\2)", line))
        return [*out, "```"] if within else out


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        return self.md.htmlStash.store(mathml(m[1], "inline")), m.start(0), m.end(0)


class _Words(Treeprocessor):
    """Words of code within a line get a <span>, which keeps them whole: browsers break after the dashes of --flag."""

    def run(self, root: Element) -> None:
        for code in [code for parent in root.iter() if parent.tag != "pre" for code in parent.findall("code")]:
            if len(code) or "-" not in (code.text or ""):
                continue
            words, code.text = (code.text or "").split(" "), ""
            for i, word in enumerate(words):
                span = SubElement(code, "span", {"class": "word"})
                span.text, span.tail = AtomicString(word), " " if i + 1 < len(words) else ""


class Docstrings(Extension):
    """For `markdown_extensions` of mkdocs.yml."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Registers the three forms; display equations after fenced code was taken out would be too late."""
        md.preprocessors.register(_Examples(md), "examples", 28)
        md.preprocessors.register(_Blocks(md), "equations", 27)
        md.treeprocessors.register(_Words(md), "words", 15)  # after inline code was found
        md.inlinePatterns.register(_Inline(r":math:`([^`]+)`", md), "math_role", 195)
        md.inlinePatterns.register(_Inline(r"(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$(?![\w$])", md), "math_dollar", 185)


def makeExtension(**options: object) -> Docstrings:
    """What Python-Markdown calls."""
    return Docstrings(**options)
