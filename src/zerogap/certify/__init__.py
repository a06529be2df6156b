"""Measured proof of the laws on a device, op by op and end to end, written down as a certificate."""
