"""The report: Markdown for reading, JSON with all samples, a file for each chart."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.chart import svg
from benchmarks.figures import Figure, Result


def write(folder: Path, facts: Mapping[str, str], results: Sequence[Result]) -> Path:
    """Write all files; gives the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        for number, chart in enumerate(result.charts, 1):
            (folder / f"{result.name}-{number}.svg").write_text(svg(chart))
    (folder / "report.json").write_text(as_json(facts, results))
    page = folder / "report.md"
    page.write_text(markdown(facts, results))
    return page


def as_json(facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """Everything, for programs."""
    return json.dumps(
        {
            "facts": dict(facts),
            "scenarios": [
                {
                    "name": result.name,
                    "about": result.about,
                    "notes": result.notes,
                    "figures": [_figure(figure) for figure in result.figures],
                    "charts": [asdict(chart) for chart in result.charts],
                }
                for result in results
            ],
        },
        indent=1,
        ensure_ascii=False,
    )


def _figure(figure: Figure) -> dict[str, object]:
    return {
        "case": figure.case,
        "name": figure.name,
        "median": _finite(figure.median),
        "samples": [_finite(sample) for sample in figure.samples],
        "target": None if figure.target is None else str(figure.target),
        "met": figure.met,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def markdown(facts: Mapping[str, str], results: Sequence[Result]) -> str:
    """The page."""
    lines = [
        "# Benchmarks",
        "",
        "Each figure is the median of its runs, with the lowest and the highest in brackets. "
        "✓ and ✗ say whether the median meets its target.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
    ]
    for result in results:
        lines += ["", f"## {result.name}", "", result.about, "", *_table(result.figures)]
        lines += [line for note in result.notes for line in ("", note)]
        for number, chart in enumerate(result.charts, 1):
            lines += ["", f"![{chart.title}]({result.name}-{number}.svg)"]
    return "\n".join([*lines, ""])


def _table(figures: Sequence[Figure]) -> list[str]:
    """A row for each case, a column for each name."""
    names = list(dict.fromkeys(figure.name for figure in figures))
    cases = list(dict.fromkeys(figure.case for figure in figures))
    found = {(figure.case, figure.name): figure for figure in figures}
    return [
        f"| | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
        *(
            f"| {case} | {' | '.join(_cell(found.get((case, n))) for n in names)} |"
            for case in cases
        ),
    ]


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.target is None:
        return figure.text
    return f"{figure.text} {'✓' if figure.met else '✗'} {figure.target}"
