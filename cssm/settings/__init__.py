"""What can be set, by topic: dataclasses of knobs, which cssm.config puts together.

family.py names the trunks and cells, and where among them a setting has a meaning. No jax here.
"""

from cssm.settings.cells import CellSettings
from cssm.settings.data import DataSettings
from cssm.settings.inference import InferenceSettings
from cssm.settings.measuring import MeasuringSettings
from cssm.settings.model import ModelSettings
from cssm.settings.optimisation import OptimisationSettings
from cssm.settings.parallel import ParallelSettings
from cssm.settings.running import RunningSettings

__all__ = [
    "CellSettings",
    "DataSettings",
    "InferenceSettings",
    "MeasuringSettings",
    "ModelSettings",
    "OptimisationSettings",
    "ParallelSettings",
    "RunningSettings",
]
