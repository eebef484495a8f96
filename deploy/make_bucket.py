"""Make the bucket of SPOTGRPO_BUCKET__URL where it is missing; the keys come from boto3's usual chain."""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

MISSING = {"404", "NoSuchBucket"}


def make_bucket(environ: Mapping[str, str]) -> bool:
    """True when it was made, False when it was there."""
    name = urlsplit(environ["SPOTGRPO_BUCKET__URL"]).netloc
    region = environ.get("SPOTGRPO_BUCKET__REGION") or "us-east-1"
    client = boto3.client(
        "s3",
        endpoint_url=environ.get("SPOTGRPO_BUCKET__ENDPOINT_URL") or None,
        region_name=region,
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    try:
        client.head_bucket(Bucket=name)
    except ClientError as exc:
        if exc.response["Error"]["Code"] not in MISSING:
            raise
    else:
        return False
    # us-east-1 is S3's default place, and the one that must not be named.
    place = {} if region == "us-east-1" else {"LocationConstraint": region}
    client.create_bucket(Bucket=name, **({"CreateBucketConfiguration": place} if place else {}))
    return True


if __name__ == "__main__":
    make_bucket(os.environ)
