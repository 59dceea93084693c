"""Hooks of mkdocs: diagrams become pictures and formulas MathML when the site is built.

So a page needs no script and no network to show them, and an invalid diagram or formula fails the build.
"""

import html
import itertools
import re
from typing import Any

import mermaidx
from latex2mathml.converter import convert

_DIAGRAM = re.compile(r'<pre><code class="language-mermaid">(.*?)</code></pre>', re.DOTALL)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_IDENTIFIER = "my-svg"
"""What the diagram library calls every picture; it must be unique within a page, since styles refer to it."""


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with an SVG picture in place of each diagram, and MathML in place of each formula."""
    numbers = itertools.count()
    content = _DIAGRAM.sub(lambda found: _picture(found[1], next(numbers)), content)
    return _FORMULA.sub(lambda found: _mathml(found.group(2), found.group(1) == "div"), content)


def _picture(diagram: str, number: int) -> str:
    svg = mermaidx.render(html.unescape(diagram)).svg().replace(_IDENTIFIER, f"diagram-{number}")
    return f'<div class="diagram">{svg}</div>'


def _mathml(formula: str, displayed: bool) -> str:
    return convert(html.unescape(formula), display="block" if displayed else "inline")
