"""Values that reading a file does not tell."""

from flowcorr.translate.unread import Unread, unread_in


def test_unread_values_are_found_wherever_they_lie():
    lost = Unread("$X", "line 1: ...")
    assert str(lost) == "$X"
    assert list(unread_in({"a": [1, (2, lost)], "b": lost})) == [lost, lost]
    assert list(unread_in({"a": [1, "$X"]})) == []
