"""Shows texts of strangers so that a person sees all that is in them: characters that nobody would
see stand there by their code points."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from mcp_bridge.text_safety import hidden_text

CODE_POINT = re.compile(r"\\{1,2}(u\{[0-9A-F]{4,6}\})")
"""Also in a text that is JSON, where a backslash is written twice."""
MAX_CHARS = 64 * 1024


def visible(text: str) -> str:
    """Return a text in which what is hidden is written out, such as `\\u{202E}`."""
    return hidden_text.visible(text[:MAX_CHARS])


def marked(text: str) -> Markup:
    """Return a text for a page, with what is hidden written out and marked."""
    return Markup(CODE_POINT.sub(mark, str(escape(visible(text)))))


def mark(found: re.Match[str]) -> str:
    return f'<mark title="A character that nobody sees">\\{found[1]}</mark>'
