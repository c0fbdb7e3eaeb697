"""Drafters: the base contract and one folder per kind."""
