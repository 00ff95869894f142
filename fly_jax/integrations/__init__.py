"""Adapters into other engines: each imports its engine lazily, and none is imported by another."""
