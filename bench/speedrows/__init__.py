"""The rows of ``bench/speed.py``: each module has functions that measure rows and name the sides they need."""
