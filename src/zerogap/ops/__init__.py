"""Ops that keep the row law: the bits of a row depend on that row alone, never on its company.

One interface, several backends: ``zerogap.ops.portable`` is plain torch and runs wherever torch runs.
"""
