"""Provider for Amazon EC2. Only :mod:`vcasgd.fleet.providers.aws.provider` imports boto3."""
