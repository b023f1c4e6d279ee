"""What a trainer hands over becomes the columns of a file."""

import numpy as np
import pytest
import torch

from flowcorr.dumps import arrays
from flowcorr.errors import BatchError

SHAPE = torch.Size([3, 2])


def test_groups_of_any_names_are_numbered():
    names = ["b", "a", "b"]
    assert arrays.numbered(names).tolist() == arrays.numbered(np.array(names)).tolist() == [1, 0, 1]
    assert arrays.numbered(torch.tensor([70, 7, 70])).tolist() == [1, 0, 1]


def test_whole_numbers_stay_whole_and_float64_stays_float64():
    assert arrays.numbers("step_indices", [[0.0, 1.0]]).dtype == torch.int64
    assert arrays.numbers("advantages", torch.ones(3, dtype=torch.float16)).dtype == torch.float32
    assert arrays.numbers("advantages", np.ones(3)).dtype == torch.float64
    with pytest.raises(BatchError, match=r"step_indices holds 0\.5"):
        arrays.numbers("step_indices", [[0.5, 1.0]])


def test_a_value_a_sample_may_be_given_for_each_of_its_steps():
    values = torch.tensor([[1.0, 1.0], [torch.nan, torch.nan], [2.0, 2.0]])
    fitted = arrays.fitted("advantages", values, SHAPE)
    torch.testing.assert_close(fitted, torch.tensor([1.0, torch.nan, 2.0]), equal_nan=True)


def test_a_column_that_all_samples_share_is_repeated_and_no_other():
    row = torch.tensor([0.5, 0.25])
    assert torch.equal(arrays.fitted("sigmas", row, SHAPE), row.expand(SHAPE))


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("advantages", torch.tensor([[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]), r"\[3, 2\]; .* \[3\], one "),
        ("old_log_probs", torch.tensor([0.5, 0.25]), r"\[2\]; .* \[3, 2\]$"),
    ],
)
def test_values_of_another_shape_are_refused(name, values, named):
    with pytest.raises(BatchError, match=rf"^{name} has shape {named}"):
        arrays.fitted(name, values, SHAPE)


LOST = torch.nan
OF_OWN_STEPS = torch.tensor([[LOST, 0.2, 0.3], [0.4, LOST, 0.6], [0.7, 0.8, LOST]])


@pytest.mark.parametrize("field", ["current_log_probs", "old_log_probs"])
def test_steps_that_each_sample_leaves_untrained_are_left_out(field):
    given = {"rollout_log_probs": torch.ones(3, 3), field: OF_OWN_STEPS, "advantages": torch.arange(3.0)}
    found = arrays.trained(given)
    torch.testing.assert_close(found[field], torch.tensor([[0.2, 0.3], [0.4, 0.6], [0.7, 0.8]]))
    assert found["step_indices"].tolist() == [[1, 2], [0, 2], [0, 1]]
    assert (found["rollout_log_probs"].shape, found["advantages"].shape) == ((3, 2), (3,))
    levels = arrays.trained(given | {"sigmas": torch.tensor([0.9, 0.6, 0.3]).expand(3, 3)})
    torch.testing.assert_close(levels["sigmas"], torch.tensor([[0.6, 0.3], [0.9, 0.3], [0.9, 0.6]]))
    assert "step_indices" not in levels


@pytest.mark.parametrize(
    "scored",
    [
        torch.tensor([[LOST, 0.2, 0.3], [0.4, LOST, 0.6], [0.7, 0.8, 0.9]]),
        torch.tensor([[0.1, 0.2, LOST]] * 3),
        torch.full((3, 3), LOST),
    ],
    ids=["lost", "one step of the window", "all"],
)
def test_terms_that_are_lost_or_of_a_whole_step_stay(scored):
    given = {"rollout_log_probs": torch.ones(3, 3), "current_log_probs": scored}
    assert arrays.trained(given) is given
