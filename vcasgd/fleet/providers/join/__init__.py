"""Provider for machines that join by themselves."""
