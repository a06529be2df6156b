"""Glue for other training frameworks; each module needs the framework it is named after."""
