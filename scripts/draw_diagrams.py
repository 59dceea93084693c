"""A hook of mkdocs: code blocks of the language `mermaid` become pictures when the site is built.

So a page needs no script and no network to show them, and an invalid diagram fails the build.
"""

import html
import re
from typing import Any

import mermaidx

_BLOCK = re.compile(r'<pre><code class="language-mermaid">(.*?)</code></pre>', re.DOTALL)
_IDENTIFIER = "my-svg"
"""What the library calls every picture; it must be unique within a page, since styles refer to it."""


def on_page_content(content: str, **_: Any) -> str:
    """The page's HTML with an SVG picture in place of each diagram."""
    for number, source in enumerate(_BLOCK.findall(content)):
        picture = mermaidx.render(html.unescape(source)).svg().replace(_IDENTIFIER, f"diagram-{number}")
        content = _BLOCK.sub(lambda _, picture=picture: f"<p>{picture}</p>", content, count=1)
    return content
