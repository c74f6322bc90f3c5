"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jax-data-parallel")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
