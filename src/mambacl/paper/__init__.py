"""The paper's tables as quoted values; `tables.yaml` holds them, with where each comes from."""

from mambacl.paper.quoted import PaperTable, Quoted, Row, paper_table, sources, table_names

__all__ = ["PaperTable", "Quoted", "Row", "paper_table", "sources", "table_names"]
