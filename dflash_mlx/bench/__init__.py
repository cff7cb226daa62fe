"""Measures a loaded pair: workloads, plain against speculative decoding, reports."""
