"""Tasks made of other libraries' trainers, each with the extra of its name."""
