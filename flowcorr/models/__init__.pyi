from .adapter_check import AdapterCheck, CannotCompare, Difference, compare_as_sampled, compare_with_pipeline
from .base import Conditioning, Guidance, ModelFamily
from .load import DTYPES, check_attention, load_family, pipeline_class_of, quiet_loaders, resolve_family
from .paths import EMBEDDED, resolve_path
from .sampling_plan import SamplingPlan, rollout_schedule, windows_of
from .schedule import Schedule

__all__ = [
    "DTYPES",
    "EMBEDDED",
    "AdapterCheck",
    "CannotCompare",
    "Conditioning",
    "Difference",
    "Guidance",
    "ModelFamily",
    "SamplingPlan",
    "Schedule",
    "check_attention",
    "compare_as_sampled",
    "compare_with_pipeline",
    "load_family",
    "pipeline_class_of",
    "quiet_loaders",
    "resolve_family",
    "resolve_path",
    "rollout_schedule",
    "windows_of",
]
