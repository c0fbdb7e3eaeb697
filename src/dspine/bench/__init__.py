"""Measuring: task sets, interleaved runs of configurations, summaries and reports."""
