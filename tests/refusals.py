"""Tables of what is refused: calls of a folder and further arguments, and what their errors say."""

import pytest

from orthojax.errors import UserError


def refused(*groups):
    """Parametrizes a test with groups (call, rows, type of error); a row has the arguments of the call, and words.

    A call without arguments has its words for rows; words are one string or several in a tuple.
    """
    groups = [(call, rows if isinstance(rows, list) else [(rows,)], *error) for call, rows, *error in groups]
    cases = [(call, row[:-1], row[-1], *(error or [UserError])) for call, rows, *error in groups for row in rows]
    return pytest.mark.parametrize(("call", "arguments", "words", "error"), cases)


def assert_refused(call, folder, arguments, words, error):
    """The error says all of the words; one for users has at most three lines."""
    with pytest.raises(error) as refusal:
        call(folder, *arguments)
    message = str(refusal.value)
    assert all(word in message for word in ((words,) if isinstance(words, str) else words)), message
    assert error is not UserError or message.count("\n") <= 2, message
