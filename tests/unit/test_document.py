import pytest

from weft.document import Document
from weft.errors import FormatError

DOCUMENT = Document({"name": "a", "count": 2, "size": 1.5, "flag": True, "list": [1, "x"], "none": None})


def test_reads_what_is_there():
    assert DOCUMENT["name"].text() == "a"
    assert DOCUMENT["count"].whole() == 2
    assert DOCUMENT["count"].number() == 2.0
    assert DOCUMENT["size"].number() == 1.5
    assert [element.value for element in DOCUMENT["list"]] == [1, "x"]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda: DOCUMENT["missing"], r'\$: "missing" is missing; the object has count, flag, list, name'),
        (lambda: Document({})["missing"], r"the object has nothing"),
        (lambda: DOCUMENT["name"]["x"], r'\$.name: expected an object, found string "a"'),
        (lambda: DOCUMENT["name"].items(), r"\$.name: expected an array"),
        (
            lambda: DOCUMENT["list"].items()[1].whole(),
            r'\$.list\[1\]: expected a whole number, found string "x"',
        ),
        (lambda: DOCUMENT["flag"].whole(), r"\$.flag: expected a whole number, found boolean true"),
        (lambda: DOCUMENT["size"].whole(), r"\$.size: expected a whole number, found number 1.5"),
        (lambda: DOCUMENT["flag"].number(), r"\$.flag: expected a number"),
        (lambda: DOCUMENT["none"].text(), r"\$.none: expected a string, found null"),
        (lambda: Document(float("inf")).number(), r"\$: expected a finite number"),
        (lambda: Document(["x" * 99]).text(), r"found array \[\"x+\.\.\.$"),
    ],
)
def test_faults_name_their_path(read, text):
    with pytest.raises(FormatError, match=text):
        read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON, so it cannot be a graph"),
        ('{"weft": "timeline", "version": 1}', r'\$.weft: expected "graph", found string "timeline"'),
        (
            '{"weft": "graph", "version": 2}',
            r"this graph has version 2, and this weft reads version 1; write it",
        ),
    ],
)
def test_parse_checks_kind_and_version(text, message):
    with pytest.raises(FormatError, match=message):
        Document.parse(text, kind="graph", version=1)
