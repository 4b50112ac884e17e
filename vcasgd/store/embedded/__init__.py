"""Command lines and configuration files for Redis or Valkey servers that vcasgd starts itself."""
