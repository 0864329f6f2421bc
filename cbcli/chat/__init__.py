"""A conversation in a terminal or a pipe, over `engine.conversation`."""
