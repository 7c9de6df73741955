"""The verb eval: exact metrics of a trained model on a labelled data set, as JSON, pictures and a short table."""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from cssm import data, rules
from cssm.config import KNOBS, Config, UserError, resolve
from cssm.data.pipeline import Outline, Source, eval_batches
from cssm.data.splits import SPLITS
from cssm.inference.charts import save_confusion, save_reliability
from cssm.inference.output import make_folder, put_json
from cssm.inference.scores import Answers, scores
from cssm.inference.spread import Spread, chosen_devices
from cssm.inference.weights import Trained, load_trained
from cssm.report import Reporter
from cssm.step import cross_entropy
from parallel import devices as par

EVAL, CONFUSION, RELIABILITY = "eval.json", "confusion.png", "reliability.png"
MOST_ROWS = 20  # classes of which the table tells; of more, those with the lowest accuracy


def evaluate(config: Config, typed: Mapping[str, Any], stream: IO[str] | None = None) -> dict[str, Any]:
    """Evaluate as the settings of the invocation and `typed` say; returns what eval.json holds.

    That is the same on any number of devices. UserError for a checkpoint or data that cannot be read, and for data
    whose images or classes are not the model's.
    """
    assert config.checkpoint is not None, "the command line wants one"
    trained = load_trained(config.checkpoint, config.checkpoint_step, typed)
    devices = chosen_devices(config)
    with Reporter(None, headless_stream=stream, quiet=config.quiet) as report:
        if not config.quiet:
            report.line(par.running_line(devices))
        asked = data_config(trained, config, typed)
        outline = data.outline(asked)
        relabel, notes = check_data(trained, outline, asked)
        for note in (*notes, *outline.notes):
            report.line(f"note: {note}")
        folder = make_folder(config.output or trained.folder / _name(trained, asked, config.split), replaces=_FILES)
        parts = SPLITS if config.split == "all" else (config.split,)
        sources = []
        for part in parts:
            with report.busy(f"preparing {asked.dataset} {part}") as count:
                sources.append(data.load(asked, part, count))
        answers, seconds = _answers(trained, devices, sources, asked, relabel, report)
        found = _found(trained, answers, asked, config.split, sources)
        put_json(folder / EVAL, found)
        title = f"{asked.dataset} {config.split}, step {trained.step}: accuracy {found['accuracy']:.4f}"
        save_confusion(folder / CONFUSION, found["confusion"], trained.class_names, title)
        save_reliability(folder / RELIABILITY, found["calibration"], title)
        speed = {"devices": len(devices), "images_per_s": found["count"] / seconds, "folder": str(folder)}
        report.event("evaluation", **{key: value for key, value in found.items() if key != "confusion"}, **speed)
        for line in table_lines(found):
            report.line(line)
        report.line(f"{found['count'] / seconds:,.0f} images/s; written to {folder}: {', '.join(_FILES)}")
    return found


_FILES = (EVAL, CONFUSION, RELIABILITY)


def data_config(trained: Trained, config: Config, typed: Mapping[str, Any]) -> Config:
    """Which images: those of the run unless others are typed, at the size that the model takes."""
    run = trained.config
    kept = {name: getattr(run, name) for name, knob in KNOBS.items() if knob.resume != "fresh" and not knob.unmet(run)}
    given = {name: value for name, value in typed.items() if KNOBS[name].group == "data"}
    if given.get("dataset", run.dataset) != run.dataset:
        kept = {name: value for name, value in kept.items() if KNOBS[name].group != "data"}
    elif trained.exported and "data_dir" not in given and run.data_dir is not None:
        raise UserError(
            f"--checkpoint {trained.folder} is an exported model, which does not tell where its data lies: "
            "type --data_dir"
        )
    kept |= {"image_size": trained.image_shape[-2], "batch_size": run.batch_size}
    for name in ("global_batch_size", "grad_accum"):
        kept.pop(name, None)
    asked = resolve({**given, "num_workers": config.num_workers, "cache_dir": config.cache_dir}, kept)
    rules.check_applies(asked, KNOBS, given)
    return asked


def check_data(trained: Trained, outline: Outline, asked: Config) -> tuple[np.ndarray, list[str]]:
    """(the model's label for each of the data's, int64; what is to be said). UserError where they do not fit."""
    if tuple(outline.image_shape) != trained.image_shape:
        there, here = ("x".join(map(str, shape)) for shape in (outline.image_shape, trained.image_shape))
        raise UserError(f"--dataset {asked.dataset} has images {there}, and the model takes {here}: type another")
    if outline.classes and trained.classes:
        if unknown := [name for name in outline.classes if name not in trained.classes]:
            raise UserError(
                f"--dataset {asked.dataset} has the class {unknown[0]}, which the model does not know; it knows "
                f"{', '.join(trained.classes[:10])}{', ...' if len(trained.classes) > 10 else ''}"
            )
        relabel = np.array([trained.classes.index(name) for name in outline.classes])
    elif outline.num_classes > trained.num_classes:
        raise UserError(
            f"--dataset {asked.dataset} has {outline.num_classes} classes, and the model tells {trained.num_classes} "
            "apart: type another"
        )
    else:
        relabel = np.arange(outline.num_classes)
    if len(relabel) < trained.num_classes:
        return relabel, [f"the data has {len(relabel)} of the model's {trained.num_classes} classes"]
    return relabel, []


def _answers(
    trained: Trained,
    devices: list[jax.Device],
    sources: list[Source],
    asked: Config,
    relabel: np.ndarray,
    report: Reporter,
) -> tuple[Answers, float]:
    """What the model answers to every example, in order, and the seconds that took without compilation."""

    def answer(variables: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        logits, labels = trained.apply(variables, batch["image"]), batch["label"]
        right = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        return {
            "label": labels,
            "predicted": jnp.argmax(logits, axis=-1).astype(jnp.int32),
            "confidence": jnp.max(jax.nn.softmax(logits), axis=-1),
            "loss": cross_entropy(logits, labels, 0.0),
            "rank": jnp.sum(logits > right, axis=-1, dtype=jnp.int32),
        }

    total = sum(map(len, sources))
    assert asked.batch_size is not None, "the recipe has one"
    spread = Spread(trained, answer, devices, max(1, min(asked.batch_size, total)), asked.prefetch)
    none = {"image": np.zeros((0, *trained.image_shape), np.uint8), "label": np.zeros(0, np.int32)}
    with report.compiling("compiling the model"):
        spread.warm_up(none)

    def batches() -> Iterator[tuple[None, dict[str, np.ndarray]]]:
        for source in sources:
            with closing(eval_batches(source, spread.batch, workers=asked.num_workers or 0)) as made:
                for batch in made:
                    yield None, {"image": batch["image"], "label": relabel[batch["label"]].astype(np.int32)}

    start = time.monotonic()
    parts: list[dict[str, np.ndarray]] = []
    with report.busy("evaluating") as count, closing(spread.run(batches())) as results:
        for _, part in results:
            parts.append(part)
            count(sum(len(p["label"]) for p in parts), total)
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Answers(**joined), time.monotonic() - start


def _found(trained: Trained, answers: Answers, asked: Config, split: str, sources: list[Source]) -> dict[str, Any]:
    if not len(answers.label):
        raise UserError(f"no example of {asked.dataset} {split} can be read: there is nothing to evaluate")
    found = scores(answers, trained.num_classes, asked.seed)
    for name, row in zip(trained.class_names, found["per_class"], strict=True):
        row["class"] = name
    bad = sum(len(source.bad) for source in sources)
    head = {"step": trained.step, "averaged": trained.averaged, "dataset": asked.dataset, "split": split}
    return head | found | ({"bad_examples": bad} if bad else {})


def _name(trained: Trained, asked: Config, split: str) -> str:
    """eval_test, or with the data set's name where it is not the run's."""
    other = f"{re.sub(r'[^A-Za-z0-9-]+', '-', asked.dataset)}_" if asked.dataset != trained.config.dataset else ""
    return f"eval_{other}{split}"


def table_lines(found: Mapping[str, Any]) -> list[str]:
    """The metrics, and a row for each class, or for the MOST_ROWS with the lowest accuracy."""
    interval, calibration = found["accuracy_interval"], found["calibration"]
    which = "the averaged parameters of step" if found["averaged"] else "step"
    lines = [
        f"{found['dataset']} {found['split']}: {found['count']:,} examples, {which} {found['step']:,}",
        f"accuracy  {found['accuracy']:.4f}   {interval['level']:.0%} interval {interval['low']:.4f} to "
        f"{interval['high']:.4f}",
    ]
    lines += [f"top-5     {found['top5_accuracy']:.4f}"] if "top5_accuracy" in found else []
    lines += [f"loss      {found['loss']:.4f}", f"ECE       {calibration['ece']:.4f}   {calibration['bins']} bins"]
    rows = [row for row in found["per_class"] if row["count"]]
    shown = rows if len(rows) <= MOST_ROWS else sorted(rows, key=lambda row: row["accuracy"])[:MOST_ROWS]
    if len(shown) < len(rows):
        lines.append(f"the {MOST_ROWS} of {len(rows)} classes with the lowest accuracy; {EVAL} has all")
    width = max(5, *(len(row["class"]) for row in shown))
    lines.append(f"{'class':<{width}}  {'examples':>8}  accuracy")
    return lines + [f"{row['class']:<{width}}  {row['count']:>8,}  {row['accuracy']:8.4f}" for row in shown]
