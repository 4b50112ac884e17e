"""Provider for Amazon EC2."""
