"""The `cacheblend` command."""
