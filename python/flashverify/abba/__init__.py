"""ABBA: two routes of flashverify measured against each other on the same cache bytes.

``python -m flashverify.abba --help`` lists the flags; docs/abba.md explains how to read
the result.
"""
