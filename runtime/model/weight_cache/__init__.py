"""Packed weights that are kept from one start to the next, in files that starts map.

`key` says what they depend on, `entry` is the form of a file, and `folder` bounds what all of them
take.
"""
