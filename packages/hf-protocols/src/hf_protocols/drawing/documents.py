"""Whole pages, and their sections."""

from __future__ import annotations

from html import escape
from importlib.resources import files

__all__ = ["read_style", "render_document", "render_section"]


def read_style() -> str:
    """Returns the style sheet of all pages."""
    return files("hf_protocols.drawing").joinpath("style.css").read_text(encoding="utf-8")


def render_document(title: str, body: str) -> str:
    """Returns a page that fits screens of 390 px and more.

    Args:
        title: of the window.
        body: HTML.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # A page that is sent to a colleague must neither load nor run anything.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{read_style()}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def render_section(title: str, introduction: str, body: str) -> str:
    """Returns a part of a page with its heading.

    Args:
        title: of the section.
        introduction: a sentence below it, or an empty string.
        body: HTML.
    """
    lead = f"<p>{escape(introduction)}</p>" if introduction else ""
    return f"<section><h2>{escape(title)}</h2>{lead}{body}</section>"
