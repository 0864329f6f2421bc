"""What `--live` shows on stderr while a command runs."""
