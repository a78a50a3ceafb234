"""Links of a Markdown page."""
from __future__ import annotations

import re
from pathlib import Path

LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#)([^)#\s]+)[^)]*\)")


def links_of(page: Path) -> list[str]:
    """The local links and pictures of a Markdown page, as written."""
    return LINK.findall(page.read_text(encoding="utf-8"))
