import pytest

from flowcorr.actor.folding import warn_if_folding_is_slower
from tests.actor.updates import assert_same, weights


@pytest.mark.parametrize(("cost", "warned"), [(lambda rows: rows**2, True), (lambda rows: rows + 8, False)])
def test_folding_that_is_slower_is_warned_of(make_run, caplog, cost, warned):
    run = make_run(rollout={"same_initial_noise": False})
    seconds = []
    run.actor.weights.transformer.register_forward_hook(lambda *call: seconds.append(cost(len(call[2][0]))))
    before = weights(run)
    warn_if_folding_is_slower(run.actor.scorer, run.sample(), clock=lambda: sum(seconds))
    assert ("actor.fold_steps=True" in caplog.text) is warned
    assert ("8 samples take 256 s" in caplog.text) is warned
    assert_same(weights(run), before, rtol=0, atol=0)
