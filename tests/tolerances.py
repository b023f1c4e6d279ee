"""How far two float32 computations of the same numbers may be apart.

Kernels round differently from CPU to CPU, from batch shape to batch shape and from row to row of a batch. Only the same
call with the same shapes on the same machine repeats its bits; every other comparison of a model's outputs takes one
of these tolerances, as `assert_close(got, expected, **MEANS)`.

A layer of the tiny models is off by one or two ulps of its largest output, `u = 2**-23 = 1.2e-7`. A velocity has some
30 layers in series, whose errors add up like a random walk: `sqrt(30) * 2u`, about 1e-6 of values of up to 4, so 5e-6.
All tolerances below leave four times that, and more where several forwards follow each other.
"""

from __future__ import annotations

from typing import Any

# Velocities, step means and latents one forward away from the same inputs.
MEANS: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5}
# Latents at the end of a window or a schedule: every forward starts from the errors of those before it.
LATENTS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
# Log-probs, in nats per latent element: errors of the mean are averaged over 512 elements of independent noise, and an
# ulp of a log-prob of -2 stays.
LOG_PROBS: dict[str, Any] = {"rtol": 0.0, "atol": 2e-6}
# Gradients of an update: backward is as deep again, and the terms of a sum over samples cancel.
GRADIENTS: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-7}
