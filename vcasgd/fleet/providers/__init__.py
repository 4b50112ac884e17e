"""One module for each place that machines come from; all keep the contract in ``base``."""
