"""Draw metrics of a run as one SVG for the documentation.

python scripts/draw_curves.py RUN PICTURE.svg eval/validation/exact_match="exact match" reward/mean=reward
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 360, 220, 44, 30, 26
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#555}.t{font-weight:600;font-size:14px}.g{stroke:#8884}"
    ".r{fill:none;stroke:#2563c9;stroke-opacity:.3}.l{fill:none;stroke:#2563c9;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}.r,.l{stroke:#6ea3ff}}"
)


def draw(run: Path, metrics: dict[str, str]) -> str:
    """One panel per metric: values thin, their running mean thick."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    panels = []
    for number, (metric, title) in enumerate(metrics.items()):
        points = [(row["iteration"], row[metric]) for row in rows if metric in row]
        panels.append(f'<g transform="translate({number * WIDTH},0)">{_panel(points, title)}</g>')
    size = f'viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" width="{WIDTH * len(panels)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(panels)}</svg>\n'


def _panel(points: list[tuple[float, float]], title: str) -> str:
    last, highest = points[-1][0], max(max(value for _, value in points) * 1.05, 1e-9)
    wide, high = WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM

    def place(point: tuple[float, float]) -> str:
        return f"{LEFT + wide * point[0] / last:.1f},{TOP + high * (1 - point[1] / highest):.1f}"

    window = max(1, len(points) // 12)
    smooth = [(x, sum(v for _, v in points[max(0, i - window) : i + 1]) / (i + 1 - max(0, i - window)))
              for i, (x, _) in enumerate(points)]  # fmt: skip
    parts = [f'<text class="t" x="{LEFT}" y="18">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        y = TOP + high * (1 - share)
        parts.append(f'<path class="g" d="M{LEFT} {y}h{wide}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{highest * share:.2f}</text>')
    for x in (0, last / 2, last):
        at = LEFT + wide * x / last
        parts.append(f'<text x="{at}" y="{HEIGHT - 8}" text-anchor="middle">{x:.0f}</text>')
    parts.append(f'<polyline class="r" points="{" ".join(map(place, points))}"/>')
    parts.append(f'<polyline class="l" points="{" ".join(map(place, smooth))}"/>')
    return "".join(parts)


if __name__ == "__main__":
    source, target, *named = sys.argv[1:]
    Path(target).write_text(draw(Path(source), dict(name.partition("=")[::2] for name in named)), encoding="utf-8")
