"""Pages: what is given is escaped, nothing is asked of the network, and plots are to scale."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from outrider.report.numbers import count, digits, memory, seconds, share, times
from outrider.report.page import Html, Section, code, details, join, note, page, paragraph, strong, table, verdict
from outrider.report.plot import Bars, Line, Mark, bar_plot, line_plot, stacked_bars

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('x')</script> & \"q\""
VOID = {"meta", "br", "hr"}


class Reader(HTMLParser):
    """The tags, attributes and text of a page; fails where tags are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.said = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def drawn(plot):
    root = ElementTree.fromstring(plot)  # noqa: S314 - our own
    return root, [each.text for each in root.iter(f"{SVG}text")]


def everything():
    plots = [
        line_plot(EVIL, [Line(EVIL, [(1, 2), (2, 3)])], across=EVIL, marks=[Mark(EVIL, y=2.5)]),
        bar_plot(EVIL, [EVIL], [Bars(EVIL, [1.0])], across=EVIL),
        stacked_bars(EVIL, [EVIL], [Bars(EVIL, [1.0])], limit=Mark(EVIL, x=2.0)),
    ]
    parts = [paragraph(EVIL), note(EVIL), code(EVIL), verdict(EVIL, "bad"), table([EVIL], [[EVIL]])]
    parts += [details(EVIL, [paragraph(EVIL)]), paragraph(join(EVIL, strong(EVIL)))]
    return page(EVIL, [Section(EVIL, [*parts, *plots])])


def test_text_cannot_become_tags():
    reader = Reader(everything())
    assert "script" not in {tag for tag, _ in reader.seen}
    assert sum(EVIL in said for said in reader.said) >= 14, "the text itself is shown"


def test_a_page_asks_nothing_of_the_network():
    reader = Reader(everything())
    policy = [a["content"] for tag, a in reader.seen if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert not [a for _, a in reader.seen if {"src", "href"} & a.keys()]
    assert "url(" not in everything()


def test_html_is_taken_as_it_is():
    assert table(["a"], [[Html("<b>1</b>")]]).count("<b>1</b>") == 1
    assert paragraph(join("a<", strong("b"))) == "<p>a&lt;<b>b</b></p>"


def test_points_lie_to_scale():
    picture = line_plot("a < b", [Line("one & two", [(0, 0), (10, 5), (20, 10)])], across="step")
    _, texts = drawn(picture)
    assert {"a < b", "one & two", "step", "0", "10", "20"} <= set(texts)
    points = re.search(r'points="([^"]+)"', picture)
    assert points is not None
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, each.split(","))) for each in points[1].split()]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y2, "upwards"


def test_between_whole_numbers_nothing_is_marked():
    plot = line_plot("p", [Line("a", [(1, 0.5), (2, 0.25), (3, 0.1)])], across="position", zero=True)
    assert "1.5</text>" not in str(plot)
    assert ">2</text>" in str(plot)


def test_doubling_axes_have_equal_steps():
    picture = line_plot("batch", [Line("speed-up", [(1, 2.0), (2, 1.5), (4, 1.0), (8, 0.5)])], across="batch", log=True)
    xs = [float(each) for each in re.findall(r'cx="([^"]+)"', picture)]
    steps = [b - a for a, b in pairwise(xs)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    with pytest.raises(ValueError, match="holds no value"):
        line_plot("batch", [Line("a", [(0, 1.0)])], across="batch", log=True)


def test_a_mark_lies_at_its_value():
    line = Line("a", [(0, 0.0), (10, 2.0)])
    root, texts = drawn(line_plot("t", [line], across="x", marks=[Mark("even", y=1.0), Mark("here", x=5.0)]))
    assert {"even", "here"} <= set(texts)
    dashed = [each for each in root.iter(f"{SVG}line") if each.get("stroke-dasharray")]
    dots = list(root.iter(f"{SVG}circle"))
    middle = sum(float(each.get("cy") or 0) for each in dots) / 2, sum(float(each.get("cx") or 0) for each in dots) / 2
    assert float(dashed[0].get("y1") or 0) == pytest.approx(middle[0], abs=0.1)
    assert float(dashed[1].get("x1") or 0) == pytest.approx(middle[1], abs=0.1)


def test_plots_without_points_are_empty_and_of_one_value_flat():
    assert "polyline" not in line_plot("none", [], across="x")
    assert "nan" not in line_plot("flat", [Line("one", [(1, 2.0), (2, 2.0)])], across="x")
    assert "nan" not in line_plot("one", [Line("one", [(1, 2.0)])], across="x", log=True)
    assert "rect" not in bar_plot("none", [], [])


def boxes(plot):
    """(x, y, width, height) of each bar, which alone have a tooltip."""
    root, _ = drawn(plot)
    found = [each for each in root.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    return [[float(each.get(name) or 0) for name in ("x", "y", "width", "height")] for each in found]


def test_bars_are_as_high_as_their_values():
    found = boxes(bar_plot("t", ["a", "b"], [Bars("one", [1.0, 2.0]), Bars("two", [4.0, -2.0])]))
    heights = [height for *_, height in found]
    assert [h / heights[0] for h in heights] == pytest.approx([1, 4, 2, 2], rel=0.02)
    assert found[3][1] == pytest.approx(found[0][1] + found[0][3], abs=0.2), "a negative bar hangs from 0"


def test_stacked_bars_follow_each_other():
    (a, b, c, d) = boxes(stacked_bars("t", ["x", "y"], [Bars("one", [1.0, 2.0]), Bars("two", [3.0, 2.0])]))
    assert a[0] + a[2] == pytest.approx(b[0], abs=0.2)
    assert b[2] / a[2] == pytest.approx(3, rel=0.02)
    assert c[0] == a[0]
    assert c[2] == pytest.approx(d[2], abs=0.2)
    with pytest.raises(ValueError, match="negative"):
        stacked_bars("t", ["x"], [Bars("one", [-1.0])])
    with pytest.raises(ValueError, match="2 values for 1 names"):
        stacked_bars("t", ["x"], [Bars("one", [1.0, 2.0])])


def test_numbers_have_three_digits():
    assert [digits(v) for v in (0, 0.12345, 1.2345, 12.345, 999.6, 1234567)] == [
        "0", "0.123", "1.23", "12.3", "1,000", "1,230,000"
    ]  # fmt: skip
    assert [memory(v) for v in (12, 1536, 1024**3 * 1.5, 1020)] == ["12 B", "1.50 KiB", "1.50 GiB", "0.996 KiB"]
    assert [seconds(v) for v in (0, 2e-9, 1.23e-5, 0.0456, 1, 12.34, 125.4)] == [
        "0 s", "2.00 ns", "12.3 µs", "45.6 ms", "1.00 s", "12.3 s", "2:05 min"
    ]  # fmt: skip
    assert (share(0.1234), times(1.517), count(1234)) == ("12.3 %", "1.52 x", "1,234")
