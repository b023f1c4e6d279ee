from .examination import diagnose, examine, examine_before_start, examine_dump, examines_before_start

__all__ = ["diagnose", "examine", "examine_before_start", "examine_dump", "examines_before_start"]
