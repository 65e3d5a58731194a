"""The paper's tables as quoted values, and its experiments. `tables.yaml` has the values and their sources."""

from mambacl.paper.quoted import PaperTable, Quoted, Row, paper_table, sources, table_names

__all__ = ["PaperTable", "Quoted", "Row", "paper_table", "sources", "table_names"]
