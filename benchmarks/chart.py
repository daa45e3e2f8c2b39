"""Charts as SVG, of lines and points; small enough not to need a library."""

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from benchmarks.figures import Chart, number

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")


def svg(chart: Chart) -> str:
    """The chart as a document."""
    points = [point for line in chart.lines.values() for point in line if not math.isnan(point[1])]
    x_marks, x_place = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, chart.logarithmic_x)
    y_marks, y_place = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP, chart.logarithmic_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 18, chart.title, anchor="middle", size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, chart.x, anchor="middle"),
        f'<g transform="rotate(-90 14 {HEIGHT / 2})">'
        f"{_text(14, HEIGHT / 2, chart.y, anchor='middle')}</g>",
    ]
    for value in x_marks:
        x = x_place(value)
        parts.append(_line([(x, TOP), (x, HEIGHT - BOTTOM)], "#d0d7de", 1))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, number(value), anchor="middle"))
    for value in y_marks:
        y = y_place(value)
        parts.append(_line([(LEFT, y), (WIDTH - RIGHT, y)], "#d0d7de", 1))
        parts.append(_text(LEFT - 6, y + 4, number(value), anchor="end"))
    for index, (name, line) in enumerate(chart.lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        placed = [(x_place(x), y_place(y)) for x, y in line if not math.isnan(y)]
        parts.append(_line(placed, colour, 2))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(LEFT + 10, TOP + 14 + 16 * index, name, colour=colour))
    return "\n".join([*parts, "</svg>\n"])


def _axis(
    values: Sequence[float], start: float, end: float, logarithmic: bool
) -> tuple[list[float], Callable[[float], float]]:
    """Where the marks are, and from a value to its place."""
    highest = max(values, default=1.0) or 1.0
    if logarithmic:
        lowest = min((value for value in values if value > 0), default=0.1)
        low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
        high = max(high, low + 1)
        marks = [10.0**power for power in range(low, high + 1)]

        def place(value: float) -> float:
            power = math.log10(max(value, 10.0**low))
            return start + (power - low) / (high - low) * (end - start)

        return marks, place
    step = 10 ** math.floor(math.log10(highest))
    step = next(step * factor for factor in (0.2, 0.5, 1, 2) if highest / (step * factor) <= 6)
    count = math.ceil(highest / step)
    return [
        step * i for i in range(count + 1)
    ], lambda value: start + value / (step * count) * (end - start)


def _line(points: Sequence[tuple[float, float]], colour: str, width: float) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#24292f"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
