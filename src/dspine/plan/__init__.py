"""Memory, context and speed of a pair before anything is loaded."""
