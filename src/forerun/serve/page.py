"""The page at `/`, with a policy that lets it load nothing but itself."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


class Page:
    """The HTML as bytes, and its headers: scripts and styles run by their hash only."""

    def __init__(self) -> None:
        text = files("forerun.serve").joinpath("page.html").read_text(encoding="utf-8")
        self.html = text.encode()
        scripts, styles = _hashes(text, "script"), _hashes(text, "style")
        policy = {
            "default-src": "'none'",
            "script-src": scripts,
            "style-src": styles,
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        self.headers = {
            "content-security-policy": "; ".join(f"{k} {v}" for k, v in policy.items()),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }


def _hashes(text: str, tag: str) -> str:
    """CSP sources for every inline element of a kind."""
    bodies = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in bodies]
    return " ".join(f"'sha256-{d}'" for d in digests) or "'none'"
