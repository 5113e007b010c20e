"""Tables of what is refused: calls of a folder and further arguments, and what their errors say."""

import pytest

from orthojax.errors import UserError


def refused(*groups):
    """Makes a test of groups (call, rows, type of error); a row has the arguments of the call, and words.

    A call without arguments has its words for rows; words are one string or several in a tuple, all of which the error
    says. One for users has at most three lines.
    """
    groups = [(call, rows if isinstance(rows, list) else [(rows,)], *error) for call, rows, *error in groups]
    cases = [(call, row[:-1], row[-1], *(error or [UserError])) for call, rows, *error in groups for row in rows]

    @pytest.mark.parametrize(("call", "arguments", "words", "error"), cases)
    def test(call, arguments, words, error, tmp_path):
        with pytest.raises(error) as refusal:
            call(tmp_path, *arguments)
        message = str(refusal.value)
        assert all(word in message for word in ((words,) if isinstance(words, str) else words)), message
        assert error is not UserError or message.count("\n") <= 2, message

    return test
