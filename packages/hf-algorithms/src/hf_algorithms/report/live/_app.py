"""Answers to requests: the page, its parts as HTML, and what has changed since."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_algorithms.report.live._parts import (
    render_comparison_part,
    render_curves_part,
    render_gantt_part,
    render_health_part,
)
from hf_algorithms.report.live._run import AXES, LiveRun, open_runs
from hf_algorithms.report.live._sample_parts import Choice, export_samples, render_sample_part, render_samples_part
from hf_protocols.drawing import read_style
from hf_protocols.errors import ConfigError, DataError
from hf_protocols.validation import show

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["build_app", "require_starlette"]

_HEADERS = {
    # the page of a run shows what a model said: nothing of it is run, and nothing is sent elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")


class _Query:
    """Values of a request's query; what is not a number or a name raises `DataError`."""

    def __init__(self, request: Request) -> None:
        self._values = request.query_params

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if not text:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise DataError(f"{name}={show(text)}: it is not a whole number of at least 0")
        return int(text)

    def choice(self) -> Choice:
        return Choice(
            iteration=self.number("iteration"),
            set=self.text("set"),
            reward=self.text("reward"),
            bin=self.number("bin"),
            page=self.number("page") or 0,
            row=self.number("row"),
            colouring=self.text("colouring"),
        )


class _Pages:
    """The runs, and a method for every address."""

    def __init__(self, runs: Sequence[LiveRun]) -> None:
        self.runs = runs

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Looks at all runs, and keeps the threads that read them waiting."""
        with ExitStack() as stack:
            for run in self.runs:
                stack.enter_context(run.lock)
                run.refresh()
            yield

    def state(self) -> dict[str, Any]:
        """Answers the page's polls: where each run stands, and a version that changes with what is shown."""
        found = []
        with self.locked():
            for run in self.runs:
                state, detail = run.describe_state()
                found.append({
                    "index": run.index,
                    "name": run.name,
                    "colour": run.colour,
                    "algorithm": run.algorithm,
                    "state": state,
                    "detail": detail,
                    "iteration": run.iteration,
                    "notes": run.notes(),
                    "version": run.version,
                })  # fmt: skip
        return {"runs": found}

    def curves(self, query: _Query) -> str:
        axis = query.text("axis") or "iteration"
        if axis not in AXES:
            raise DataError(f"axis={show(axis)} is not one of {', '.join(AXES)}")
        return render_curves_part(self._chosen(query), axis, query.text("filter"))

    def health(self, query: _Query) -> str:
        return render_health_part(self._chosen(query))

    def compare(self, query: _Query) -> str:
        return render_comparison_part(self._chosen(query))

    def gantt(self, query: _Query) -> str:
        return render_gantt_part(self._one(query), query.number("iteration"))

    def samples(self, query: _Query) -> str:
        return render_samples_part(self._one(query), query.choice())

    def sample(self, query: _Query) -> str:
        return render_sample_part(self._one(query), query.choice())

    def export(self, query: _Query) -> str:
        return export_samples(self._one(query), query.choice())

    def _one(self, query: _Query) -> LiveRun:
        return self._at(query.number("run") or 0)

    def _chosen(self, query: _Query) -> list[LiveRun]:
        """The runs that are shown; all of them where the query names none."""
        text = query.text("runs")
        if not text:
            return list(self.runs)
        parts = text.split(",")
        if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
            raise DataError(f"runs={show(text)}: it is not a list of numbers")
        return [self._at(int(part)) for part in dict.fromkeys(parts)]

    def _at(self, index: int) -> LiveRun:
        if index >= len(self.runs):
            raise DataError(f"run {index}: there are {len(self.runs)} runs, numbered from 0")
        return self.runs[index]


def build_app(directories: Sequence[str | Path], *, hosts: Sequence[str] = ()) -> Starlette:
    """Returns the application that shows these runs.

    Args:
        directories: of runs, which may go on, or lie still.
        hosts: names by which browsers may call it next to those of this machine's loopback; `*` for any. Other names
            are refused, so that a foreign page cannot read the samples through a name that it points here.

    Raises:
        ConfigError: without the extra `serve`, or for a directory that holds no run.
    """
    require_starlette()
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    pages = _Pages(open_runs([Path(each) for each in directories]))

    def part(render: Callable[[_Query], str], media_type: str = "text/html") -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            try:
                with pages.locked():
                    return Response(render(_Query(request)), media_type=media_type, headers=_HEADERS)
            except DataError as error:
                return PlainTextResponse(str(error), status_code=400, headers=_HEADERS)

        return answer

    def state(request: Request) -> Response:
        return JSONResponse(pages.state(), headers=_HEADERS)

    parts = {name: getattr(pages, name) for name in ("curves", "health", "compare", "gantt", "samples", "sample")}
    routes = [
        Route("/", _static("text/html", "live/page.html")),
        Route("/page.css", _static("text/css", "live/page.css", before=read_style())),
        Route("/page.js", _static("text/javascript", "live/page.js")),
        Route("/state", state),
        *(Route(f"/parts/{name}", part(render)) for name, render in parts.items()),
        Route("/samples.jsonl", part(pages.export, "application/jsonl")),
    ]
    allowed = [*_LOOPBACK, *hosts]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed)])


def require_starlette() -> None:
    """Refuses to go on without the libraries of the extra.

    Raises:
        ConfigError: with the line that installs them.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"hybridflow serve: the library {error.name} is not installed. Run: pip install 'hf-algorithms[serve]'"
        ) from None


def _static(media_type: str, name: str, before: str = "") -> Callable[[Request], Response]:
    """A file of this package, after another text."""

    def answer(request: Request) -> Response:
        from starlette.responses import Response

        text = importlib.resources.files("hf_algorithms.report").joinpath(name).read_text(encoding="utf-8")
        return Response(before + text, media_type=media_type, headers=_HEADERS)

    return answer
