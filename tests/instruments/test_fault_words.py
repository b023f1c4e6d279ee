"""Every fault of log-probs has its meaning."""

from flowcorr.instruments.fault_words import FAULTS
from flowcorr.instruments.faults import FINDERS


def test_faults_have_a_meaning_in_the_order_of_their_rules():
    assert list(FAULTS) == [finder.__name__.removeprefix("_") for finder in FINDERS]
    names = list(FAULTS)
    for place, fault in enumerate(FAULTS.values()):
        assert fault.meaning
        assert set(fault.hides) <= set(names[place + 1 :])
