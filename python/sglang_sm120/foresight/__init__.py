"""Answers before the money is spent: what a model costs on a machine, and whether a drafter fits a target."""
