"""flashverify inside inference engines: one subpackage for each engine.

Importing this package imports no engine.
"""
