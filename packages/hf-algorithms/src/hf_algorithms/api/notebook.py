"""A notebook: how it is recognised, and the hints of libraries about widgets that progress here does not use."""

from __future__ import annotations

import builtins
import logging
import warnings

__all__ = ["hide_widget_hints", "is_notebook"]


def is_notebook() -> bool:
    """True while IPython runs a cell."""
    return hasattr(builtins, "get_ipython")


def hide_widget_hints() -> None:
    """Has tqdm and Ray not recommend ipywidgets when a cell imports them: progress is lines of text."""
    warnings.filterwarnings("ignore", message="IProgress not found")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
