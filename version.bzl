"""The version of the package. Its major number is the precision revision."""

VERSION = "4.0.0"
