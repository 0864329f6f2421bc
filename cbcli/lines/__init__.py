"""What `cacheblend run` is made of: lines read, parsed, answered and written, one by one."""
