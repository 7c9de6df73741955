"""What a checkpoint keeps of its configuration, and the configuration with which a run goes on."""

from collections.abc import Mapping
from typing import Any

from cssm.config import KNOBS, Config, UserError, applicable, known, resolve


def resume_record(config: Config, effective_batch: int, grad_accum: int) -> dict[str, Any]:
    """What a checkpoint keeps of its configuration, for resume_config. The batch is kept as the total, so
    that a run that goes on with another number of devices takes the same steps.
    """
    batch = {"batch_size": None, "global_batch_size": effective_batch, "grad_accum": grad_accum}
    return applicable(config) | batch


def resume_config(saved: Mapping[str, Any], typed: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """The configuration with which a saved run goes on, and the changes: `lr: was 0.003, now 0.001`.

    saved: from resume_record. typed: Parsed.typed. The settings of the invocation (devices, workers, output)
    come from typed alone. Raises UserError where typed changes one that must stay, such as the model's.
    """
    typed = known(typed)
    record = {name: value for name, value in known(saved, "").items() if KNOBS[name].resume != "fresh"}
    before = resolve({}, record)
    for name, value in typed.items():
        if KNOBS[name].resume == "fixed" and value != getattr(before, name):
            has = "none" if getattr(before, name) is None else getattr(before, name)
            raise UserError(
                f"--{name} {value}: the run to resume has {has}, which cannot change; "
                f"leave --{name} out, or start a new run without --resume"
            )
    if typed.get("find_batch_size"):
        if typed.get("resume") != "auto":  # which is typed for a first start and for later ones alike
            raise UserError(
                "--find_batch_size is for a new run, the one to resume keeps its effective batch: leave it out"
            )
        typed = {name: value for name, value in typed.items() if name != "find_batch_size"}
    anew = {name: value for name, value in typed.items() if KNOBS[name].resume != "fixed"}
    after = resolve(anew, record)
    kept = [name for name in KNOBS if KNOBS[name].resume != "fresh"]
    changed = [name for name in kept if getattr(before, name) != getattr(after, name)]
    return after, [f"{name}: was {getattr(before, name)}, now {getattr(after, name)}" for name in changed]
