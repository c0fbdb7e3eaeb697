"""Text around the tokens: chat templates, detokenising, stop strings."""
