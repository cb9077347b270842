"""Curves of several algorithms and seeds as one SVG picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["draw_curves"]

Curve = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 420, 260, 44, 30, 26, 110
COLORS = ("#2563c9", "#c2410c", "#15803d", "#9333ea", "#b91c1c", "#0e7490", "#737373", "#a16207")
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600;font-size:14px}.g{stroke:#8884}"
    ".s{fill:none;stroke-opacity:.25}.m{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}}"
)


def draw_curves(panels: Mapping[str, Mapping[str, Sequence[Curve]]]) -> str:
    """Returns an SVG: one panel per title; in it each name's seeds thin and their mean thick.

    Args:
        panels: curves of each name's seeds, pairs of x and value, by title and name. The mean is taken at each x that
            all seeds have.
    """
    parts = [
        f'<g transform="translate({number * (WIDTH + LEGEND)},0)">{_draw_panel(title, named)}</g>'
        for number, (title, named) in enumerate(panels.items())
    ]
    wide = (WIDTH + LEGEND) * len(panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {HEIGHT}" width="{wide}">'
    return f"{head}<style>{STYLE}</style>{''.join(parts)}</svg>\n"


def _draw_panel(title: str, named: Mapping[str, Sequence[Curve]]) -> str:
    points = [point for curves in named.values() for curve in curves for point in curve]
    last, highest = max(x for x, _ in points), max(max(value for _, value in points) * 1.05, 1e-9)
    wide, high = WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM

    def place(curve: Curve) -> str:
        return " ".join(f"{LEFT + wide * x / last:.1f},{TOP + high * (1 - y / highest):.1f}" for x, y in curve)

    parts = [f'<text class="t" x="{LEFT}" y="18">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        y = TOP + high * (1 - share)
        parts.append(f'<path class="g" d="M{LEFT} {y}h{wide}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{highest * share:.2f}</text>')
        at = LEFT + wide * share
        parts.append(f'<text x="{at}" y="{HEIGHT - 8}" text-anchor="middle">{last * share:.0f}</text>')
    for number, (name, curves) in enumerate(named.items()):
        color = COLORS[number % len(COLORS)]
        parts += [f'<polyline class="s" stroke="{color}" points="{place(curve)}"/>' for curve in curves]
        parts.append(f'<polyline class="m" stroke="{color}" points="{place(_average(curves))}"/>')
        parts.append(f'<text x="{WIDTH - 8}" y="{TOP + 10 + 18 * number}" style="fill:{color}">{name}</text>')
    return "".join(parts)


def _average(curves: Sequence[Curve]) -> Curve:
    values = [dict(curve) for curve in curves]
    shared = sorted(set.intersection(*(set(each) for each in values)))
    return [(x, sum(each[x] for each in values) / len(values)) for x in shared]
