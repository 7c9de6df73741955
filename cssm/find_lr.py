"""--find_lr: a learning-rate range test (Smith 2017, "Cyclical learning rates", section 3.3).

Real steps of the real run, but for the rate, which rises by the same factor from step to step. Where the loss falls
fastest over the logarithm of the rate, the rate is a good peak; where it is lowest it is already too large.
"""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np
import optax

from cssm.config import UserError
from cssm.engine import Engine
from cssm.meter import Meter
from cssm.recipes import scaled_lr
from cssm.report import Reporter
from cssm.setup import Setup, with_schedule
from cssm.step import Totals

STEPS, LOWEST, HIGHEST = 120, 1e-6, 10.0
# A loss so many times the lowest so far has run away.
RUN_AWAY = 4.0
SMOOTHING = 0.8  # of the running mean of the losses
SHOW_EVERY = 10
# Of the first loss: a smaller fall is rounding.
LEAST = 1e-3
# A slope is that of so many steps on each side. The first and last rates have none: there the mean has hardly begun, or
# the loss runs away.
SIDE = 8


def find_lr(setup: Setup, report: Reporter, meter: Meter) -> dict[str, Any]:
    """Take the steps, draw find_lr.png in the run's directory, print what to type; all processes must call it.

    Returns {lr: the suggestion, as --lr, lowest_at, rates, losses, plot}; the rates are those that steps had, which
    --lr_scale makes of --lr. UserError where the loss falls nowhere.
    """
    ratio = (HIGHEST / LOWEST) ** (1 / (STEPS - 1))
    rates = [LOWEST * ratio**i for i in range(STEPS)]
    schedule = optax.exponential_decay(LOWEST, transition_steps=1, decay_rate=ratio)
    engine = Engine(with_schedule(setup, schedule), meter)
    engine.initialise()
    losses: list[float] = []
    with report.progress(STEPS), closing(engine.batches(1, STEPS)) as batches:
        for step, batch in enumerate(batches, 1):
            engine.take(batch)
            loss = Totals.of(engine.window, setup.devices).means["loss"]
            engine.reset()
            report.update(step, loss=loss if step % SHOW_EVERY == 0 else None)
            if not math.isfinite(loss):
                break
            losses.append(loss)
            if (means := smoothed(losses))[-1] > RUN_AWAY * min(means):
                break
    best, lowest = suggestion(rates[: len(losses)], losses)
    config = setup.config
    assert config.lr is not None
    best /= scaled_lr(config, setup.batching.effective)[0] / config.lr
    found: dict[str, Any] = {"lr": float(f"{best:.2g}"), "lowest_at": lowest}
    found |= {"rates": rates[: len(losses)], "losses": losses, "plot": None}
    if jax.process_index() == 0:
        found["plot"] = _draw(setup, report, found)
    report.event("find_lr", **found)
    report.line(
        f"suggestion: --lr {found['lr']:g}, where the loss falls fastest; it is lowest at a rate of {lowest:.2g}"
    )
    return found


def smoothed(losses: Sequence[float]) -> list[float]:
    """Running means, corrected for their start."""
    means, mean = [], 0.0
    for i, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        means.append(mean / (1 - SMOOTHING**i))
    return means


def suggestion(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(the rate at which the smoothed loss falls fastest over log rate, that at which it is lowest)."""
    means = np.array(smoothed(losses))
    lowest = int(means.argmin()) if len(means) else 0
    centres = range(SIDE, lowest - SIDE + 1)
    # Of lines through many steps: between two, the noise of a batch is steeper than any fall.
    around = [slice(centre - SIDE, centre + SIDE + 1) for centre in centres]
    slopes = [np.polyfit(np.log(rates[steps]), means[steps], 1)[0] for steps in around]
    if min(slopes, default=0) >= 0 or means[0] - means[lowest] < LEAST * means[0]:
        raise UserError(
            f"--find_lr: the loss does not fall at any rate from {LOWEST:g} on (first {losses[:1]}): look at the data, "
            "or at other settings"
        )
    return float(rates[centres[int(np.argmin(slopes))]]), float(rates[lowest])


def _draw(setup: Setup, report: Reporter, found: dict[str, Any]) -> str | None:
    """The losses over the rates, as a picture and as numbers; None where nothing can draw."""
    directory = setup.run.directory
    (directory / "find_lr.json").write_text(json.dumps(found), encoding="utf-8")
    path = directory / "find_lr.png"
    try:
        from cssm.report.plots import draw_range
    except ModuleNotFoundError as error:
        report.line(f"no plot was drawn, {error.name} is not installed: type pip install {error.name}")
        return None
    draw_range(found["rates"], found["losses"], smoothed(found["losses"]), found["lr"]).savefig(path)
    report.line(f"plot: {path}")
    return str(path)
