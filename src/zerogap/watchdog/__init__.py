"""Keeps a run honest: watches processes, log lines and engines, and stops a run that can only wait for ever.

Nothing is imported here, so that the pump process stays as small as the standard library allows.
"""
