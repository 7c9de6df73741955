"""docs/reference.md: every flag, from the same declarations as the flags themselves.

make reference      # writes it anew; a test compares it with what this gives
"""

from collections.abc import Mapping

from cssm.config import KNOBS, VERBS
from cssm.flags import condition_text
from cssm.knobs import Knob
from cssm.settings.names import REFUSED, REFUSED_VALUES, SHORTHANDS

_KINDS = {bool: "switch", int: "whole number", float: "number", str: "text"}
_RESUME = {"fixed": "cannot change", "kept": "kept, unless typed anew", "fresh": "typed anew each time"}


def reference_page(knobs: Mapping[str, Knob] = KNOBS) -> str:
    """The page in Markdown: a table for each group, in the order of --help."""
    lines = [
        "# All flags",
        "",
        "Made by `make reference` from the settings themselves; `--help` tells the same. Settings are for training,",
        "and for other verbs where that is said. A switch is off as `--no_NAME`. *On resume*: what becomes of a",
        "setting when a run goes on.",
    ]
    group = ""
    for knob in knobs.values():
        if knob.group != group:
            group = knob.group
            lines += ["", f"## {group.capitalize()}", "", "| flag | what it sets | default | applies | on resume |"]
            lines.append("|---|---|---|---|---|")
        lines.append(_row(knob, knobs))
    lines += ["", "## Short forms", "", "| flag | stands for |", "|---|---|"]
    lines += [f"| `--{name}` | `--{knob} {value}` |" for name, (knob, value) in SHORTHANDS.items()]
    lines += ["", "## Refused, and what to use instead", "", "| flag | why |", "|---|---|"]
    lines += [f"| `--{name}` | {_cell(reason)} |" for name, reason in REFUSED.items()]
    lines += [f"| `--{name} {value}` | {_cell(reason)} |" for (name, value), reason in REFUSED_VALUES.items()]
    return "\n".join(lines) + "\n"


def _row(knob: Knob, knobs: Mapping[str, Knob]) -> str:
    names = "<br>".join(f"`--{name}`" for name in (knob.name, *knob.aliases))
    kind = f" {_KINDS[knob.type]}{f' in {knob.bounds}' if knob.bounds else ''}" if not knob.choices else ""
    choices = f": {', '.join(f'`{choice}`' for choice in knob.choices)}" if knob.choices else f" ({kind.strip()})"
    default = knob.unset if knob.default is None else f"`{knob.default}`".replace("False", "off").replace("True", "on")
    applies = "; ".join(filter(None, (_verbs(knob), condition_text(knob, knobs))))
    resume = _RESUME[knob.resume] if "train" in knob.verbs else ""
    return f"| {' | '.join([names, _cell(knob.help) + choices, _cell(default), _cell(applies), resume])} |"


def _verbs(knob: Knob) -> str:
    others = ", ".join(verb for verb in knob.verbs if verb != "train")
    if knob.verbs == VERBS or not others:
        return "all verbs" if others else ""
    return f"also {others}" if "train" in knob.verbs else f"for {others}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference_page(), end="")
