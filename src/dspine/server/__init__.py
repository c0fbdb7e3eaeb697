"""The HTTP server: OpenAI's routes and llama-server's, in front of one engine."""
