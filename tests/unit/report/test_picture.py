from xml.etree import ElementTree

import pytest

from weft.report.picture import LATER, LEFT, RIGHT, WIDTH, timeline_svg
from weft.timeline import KINDS, Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"
STEP = Timeline(
    [
        Span(0, "F", 3, 0.0, 0.010, stage=0),
        Span(0, "wait", 3, 0.010, 0.030),
        Span(0, "B", 3, 0.030, 0.040, stage=0),
        Span(1, "F", 3, 0.010, 0.020, stage=1),
    ]
)


def texts(svg):
    return [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_what_it_says():
    said = texts(timeline_svg(STEP, "a step"))
    assert said[0] == "a step"
    assert said.count("3") == 3
    for text in (
        "rank 0",
        "rank 1",
        "50.0%",
        "75.0%",
        "forward",
        "backward",
        "waiting",
        "40",
        "milliseconds",
    ):
        assert text in said


def test_boxes_stay_inside_the_lanes():
    for box in ElementTree.fromstring(timeline_svg(STEP, "")).iter(f"{SVG}rect"):
        if box.find(f"{SVG}title") is not None:
            x, width = float(box.get("x")), float(box.get("width"))
            assert LEFT <= x and x + width <= WIDTH - RIGHT + 0.1


def test_boxes_of_later_stages_are_lower():
    loop = Timeline([Span(0, "F", 0, stage, stage + 1, stage=stage) for stage in (0, 2, 4, 6, 8)])
    svg = ElementTree.fromstring(timeline_svg(loop, ""))
    boxes = [box for box in svg.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert [float(box.get("height")) for box in boxes] == [38, 26, 14, 14, 14]
    assert len({float(box.get("y")) + float(box.get("height")) / 2 for box in boxes}) == 1
    assert LATER in texts(timeline_svg(loop, "")) and LATER not in texts(timeline_svg(STEP, ""))


def test_text_is_escaped():
    hostile = '</text><script>alert("x")</script>\x00&'
    svg = timeline_svg(Timeline([Span(0, "F", 0, 0, 1, label=hostile)]), hostile)
    assert "<script" not in svg
    assert texts(svg)[0] == hostile.replace("\x00", "\\x00")


def test_needs_nothing_from_outside():
    svg = timeline_svg(STEP, "").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in svg and "@import" not in svg


@pytest.mark.parametrize("duration_s", [0.0, 1e-6, 0.0123, 1.0, 777.0])
def test_every_duration_has_an_axis_and_every_kind_is_drawn(duration_s):
    spans = [Span(0, kind, 0, 5.0, 5.0 + duration_s) for kind in KINDS]
    assert texts(timeline_svg(Timeline(spans), "")).count("0") >= 1


def test_an_empty_timeline():
    assert "milliseconds" in texts(timeline_svg(Timeline(), ""))
