"""The bucket over S3: the only package that imports boto3."""

from spotgrpo.shared.s3.doctor import Problem, StoreReport, inspect, require_compare_and_swap
from spotgrpo.shared.s3.store import S3Store

__all__ = ["Problem", "S3Store", "StoreReport", "inspect", "require_compare_and_swap"]
