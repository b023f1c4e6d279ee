from flowcorr.instruments.plan.answers import duration, gigabytes


def test_sizes_and_times_are_short():
    assert (gigabytes(2.04e9), gigabytes(3.2e7)) == ("2.0 GB", "32.0 MB")
    assert (duration(61.2), duration(0.123)) == ("61 s", "0.12 s")
