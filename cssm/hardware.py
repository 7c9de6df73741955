"""The `devices` verb: what there is to train on."""

from typing import IO

from cssm.config import Config
from cssm.report import devices_report
from parallel.devices import describe, running_line, select_devices


def show_devices(config: Config, json_stream: IO[str] | None = None) -> None:
    """Print the devices that a run with this configuration would use, or write them as one JSON event."""
    devices = select_devices(config.platform, config.gpus, config.num_devices, config.multi_gpu == "off")
    devices_report(describe(devices), json_stream)
    if json_stream is None:
        print(running_line(devices))
