"""The benchmarks' figures and how they are reported."""

import json
import math
from xml.etree import ElementTree

import pytest

from benchmarks.chart import svg
from benchmarks.figures import Chart, Result, at_least, at_most, number
from benchmarks.histogram import Histogram
from benchmarks.report import as_json, markdown


def test_a_figure_is_the_median_with_its_spread() -> None:
    result = Result("r", "about")
    for sample in (3.0, 1.0, 2.0):
        result.add("case", "cost, µs", sample, at_most(2))
    (figure,) = result.figures
    assert figure.median == 2
    assert figure.text == "2.00 (1.00 … 3.00)"
    assert figure.met is True


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [(at_most(2), 2, True), (at_most(2), 2.1, False), (at_least(2), 2, True), (at_least(2), 1, 0)],
)
def test_a_target_is_met_or_not(target: object, value: float, met: bool) -> None:
    assert target.is_met(value) == met  # type: ignore[attr-defined]


def test_nothing_measured_meets_no_target() -> None:
    result = Result("r", "about")
    result.add("case", "p99, ms", math.nan, at_most(25))
    assert result.figures[0].met is False
    assert json.loads(as_json({}, [result]))["scenarios"][0]["figures"][0]["median"] is None


def test_targets_are_left_out_where_they_mean_nothing() -> None:
    result = Result("r", "about", judged=False)
    result.add("case", "x", 1, at_most(0))
    assert result.figures[0].met is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (1.3, "1.30"),
        (25, "25.0"),
        (1234.5, "1,230"),
        (3e5, "300,000"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_percentiles() -> None:
    found = Histogram([(1_000_000, 98), (5_000_000, 1)]) + Histogram([(9_000_000, 1)])
    assert len(found) == 100
    assert found.percentile_ms(50) == 1
    assert found.percentile_ms(98) == 1
    assert found.percentile_ms(99) == 5
    assert found.percentile_ms(100) == 9
    assert math.isnan(Histogram().percentile_ms(50))


def test_a_page_has_a_row_for_each_case() -> None:
    result = Result("fanout", "What it is.", notes=["A note."])
    result.add("a", "cost", 1, at_most(2))
    result.add("b", "cost", 3, at_most(2))
    result.add("b", "rate", 5)
    result.charts.append(Chart("Rise", "x", "y", {"line": [(1, 2)]}))
    page = markdown({"cores": "2"}, [result])
    assert "| cores | 2 |" in page
    assert "| a | 1.00 ✓ ≤ 2.00 |  |" in page
    assert "| b | 3.00 ✗ ≤ 2.00 | 5.00 |" in page
    assert "![Rise](fanout-1.svg)" in page
    assert "A note." in page


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize(
    "points", [[], [(1.0, 2.0)], [(100.0, 0.0), (10_000.0, 7.5), (3.0, math.nan)]]
)
def test_a_chart_is_well_formed(points: list[tuple[float, float]], logarithmic: bool) -> None:
    chart = Chart("a < b", "x", "y", {"one & two": points}, logarithmic, logarithmic)
    root = ElementTree.fromstring(svg(chart))
    shown = [point for point in points if not math.isnan(point[1])]
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(shown)
    for circle in circles:
        assert 0 <= float(circle.attrib["cx"]) <= 640
        assert 0 <= float(circle.attrib["cy"]) <= 360
