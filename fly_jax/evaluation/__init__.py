"""Evaluation: the speed and the quality of rules, measured side by side."""
