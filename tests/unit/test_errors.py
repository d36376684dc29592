import re

import pytest

from weft import errors


def tree():
    return [value for value in vars(errors).values() if isinstance(value, type)]


def test_the_docstring_draws_every_exception():
    drawn = set(re.findall(r"(\w+Error)\b", errors.__doc__)) - {"ValueError"}
    assert drawn == {error.__name__ for error in tree()}


@pytest.mark.parametrize("error", tree())
def test_all_are_weft_errors(error):
    assert issubclass(error, errors.WeftError)
    marked = re.search(rf"\b{error.__name__} +\(ValueError\)", errors.__doc__)
    assert issubclass(error, ValueError) == bool(marked)


def test_a_peers_error_names_the_rank():
    error = errors.PeerError(3, "out of memory")
    assert (error.rank, error.text, str(error)) == (3, "out of memory", "rank 3 failed: out of memory")
