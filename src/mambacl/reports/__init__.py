"""Tables, figures and the HTML page of finished and unfinished runs."""

from mambacl.reports.runs import load_run
from mambacl.reports.tables import comparison_table
from mambacl.reports.writing import write_report

__all__ = ["comparison_table", "load_run", "write_report"]
