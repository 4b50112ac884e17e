"""Object storage: packages and checkpoints, in a folder, an S3 bucket, or a GCS bucket."""
