"""A reward that takes long is named while the run waits for it."""

import time

from flowcorr.rewards.slow import reported_when_slow


def test_the_log_goes_on_to_name_a_reward_that_hangs(caplog):
    end = time.monotonic() + 60
    with reported_when_slow("mine", timeout=0.02, every=0.02):
        while len(caplog.records) < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert all("reward mine" in record.getMessage() for record in caplog.records)
