"""The verb predict: classes and probabilities of images, on all devices, in the order of the inputs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from cssm.config import Config, UserError
from cssm.data.inputs import Inputs, Piece, open_inputs
from cssm.inference.explain import explained
from cssm.inference.output import file_name
from cssm.inference.pictures import save_saliency, save_states
from cssm.inference.predictions import Prediction, Predictions, check_output
from cssm.inference.spread import Spread, chosen_devices
from cssm.inference.weights import Trained, load_trained
from cssm.report import Reporter
from cssm.report.terminal import plural
from parallel import devices as par

TOP_K = 5


def predict(
    config: Config, typed: Mapping[str, Any], paths: Sequence[str], stream: IO[str] | None = None
) -> dict[str, Any]:
    """Predict the inputs that the paths name; returns {count, skipped, devices, images_per_s, ...}.

    UserError, once everything that could be read is predicted, where inputs could not be read; and before, for inputs
    that are not there or do not fit the model.
    """
    assert config.checkpoint is not None, "the command line wants one"
    path = check_output(config.output, config.explain)
    trained = load_trained(config.checkpoint, config.checkpoint_step, typed)
    top_k = min(TOP_K, trained.num_classes) if config.top_k is None else config.top_k
    if top_k > trained.num_classes:
        raise UserError(f"--top_k {top_k}: the model tells {trained.num_classes} classes apart, type as many or fewer")
    inputs = open_inputs(paths, trained.image_shape)
    devices = chosen_devices(config)
    with Reporter(None, headless_stream=stream, quiet=config.quiet) as report:
        if not config.quiet:
            report.line(par.running_line(devices))
            if inputs.others:
                report.line(f"note: left aside what is no image: {plural(inputs.others, 'file')}")
        job = _Job(trained, inputs, config, top_k, report)
        with Predictions(path, top_k, report) as predictions:
            facts = job.run(devices, predictions)
        facts |= {"output": str(path)} if path else {}
        facts |= {"explain": config.explain} if config.explain else {}
        report.event("predictions", **facts)
        where = f", in {path}" if path else ""
        where += f", pictures in {config.explain}" if config.explain else ""
        report.line(f"predicted {plural(facts['count'], 'image')}, {facts['images_per_s']:,.0f} images/s{where}")
        if inputs.bad:
            rest = "; the others were predicted" if len(inputs.bad) < len(inputs) else ""
            raise UserError(
                f"{len(inputs.bad):,} of {len(inputs):,} inputs could not be read, among them {next(iter(inputs.bad))} "
                f"({next(iter(inputs.bad.values()))}): repair or remove them{rest}"
            )
    return facts


@dataclass(frozen=True)
class _Job:
    trained: Trained
    inputs: Inputs
    config: Config
    top_k: int
    report: Reporter

    def run(self, devices: list[jax.Device], predictions: Predictions) -> dict[str, Any]:
        """Predict all, and tell how fast; compilation does not count."""
        total, workers = len(self.inputs), self.config.num_workers or 0
        batch_size = self.trained.config.batch_size
        assert batch_size is not None, "the recipe has one"
        # No more rows than there are inputs for.
        size = min(batch_size, -(-total // len(devices)))
        spread = Spread(self.trained, self._answer(), devices, size, self.config.prefetch)
        with self.report.compiling("compiling the model"):
            spread.warm_up({"image": np.zeros((0, *self.trained.image_shape), np.uint8)})
        start, done = time.monotonic(), 0
        with self.report.busy("predicting") as count, closing(self.inputs.pieces(spread.batch, workers)) as pieces:
            count(0, total)
            labelled = ((piece, {"image": piece.images}) for piece in pieces)
            with closing(spread.run(labelled)) as results:
                for piece, found in results:
                    for row in self._rows(piece, found):
                        predictions.write(row)
                    if self.config.explain:
                        self._draw(Path(self.config.explain), done, piece, found)
                    done += len(piece.names)
                    count(done + len(self.inputs.bad), total)
        seconds = time.monotonic() - start
        skipped = {"skipped": len(self.inputs.bad), "bad": dict(self.inputs.bad)} if self.inputs.bad else {"skipped": 0}
        return {"count": done, **skipped, "devices": len(devices), "images_per_s": done / seconds, "seconds": seconds}

    def _answer(self) -> Any:
        explain = explained(self.trained) if self.config.explain else None

        def answer(variables: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
            why: dict[str, Any] = {}
            if explain:
                logits, why = explain(variables, batch["image"])
            else:
                logits = self.trained.apply(variables, batch["image"])
            probability, label = jax.lax.top_k(jax.nn.softmax(logits), self.top_k)
            return {"probability": probability.astype(jnp.float32), "label": label, **why}

        return answer

    def _rows(self, piece: Piece, found: Mapping[str, np.ndarray]) -> Iterator[Prediction]:
        names = self.trained.class_names
        answers = zip(piece.names, found["label"].tolist(), found["probability"].tolist(), strict=True)
        for name, labels, probabilities in answers:
            guesses = zip(labels, probabilities, strict=True)
            top = [{"class": names[label], "label": label, "probability": p} for label, p in guesses]
            yield {"input": name, **top[0], "top": top}

    def _draw(self, folder: Path, done: int, piece: Piece, found: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for i, name in enumerate(piece.names):
            stem = file_name(done + i, len(self.inputs), name)
            guess = self.trained.class_names[int(found["label"][i, 0])]
            caption = f"{guess}: {found['probability'][i, 0]:.3f}"
            save_saliency(folder / f"{stem}_saliency.png", piece.images[i], found["saliency"][i], caption)
            if states := {cell: values[i] for cell, values in found["states"].items()}:
                save_states(folder / f"{stem}_states.gif", piece.images[i], states, caption)
