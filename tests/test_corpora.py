"""Each input that a reader was ever given by the fuzzers is read or refused with a typed error."""

import pytest

from tests.corpora.posted import posted
from tests.corpora.readers import READERS, attempt, inputs


@pytest.mark.parametrize("name", READERS)
def test_every_input_is_read_or_refused(name: str) -> None:
    found = inputs(name)
    assert len(found) > 3
    try:
        for path in found:
            try:
                attempt(name, path.read_bytes())
            except BaseException as error:  # a panic in a compiled library is no Exception
                raise AssertionError(f"{path}: {error!r}") from error
    finally:
        if posted.cache_info().currsize:
            posted().close()
            posted.cache_clear()
