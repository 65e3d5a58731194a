"""Selective scan: one function, several backends, one plain reference."""

from mambacl.scan.dispatch import available_backends, scan_low_rank, scan_tokens, scans_by_kernel, selective_scan
from mambacl.scan.reference import selective_scan_reference

__all__ = [
    "available_backends",
    "scan_low_rank",
    "scan_tokens",
    "scans_by_kernel",
    "selective_scan",
    "selective_scan_reference",
]
