"""The name by which `forerun.lab.bounds.informed` was first known; it stays."""

from forerun.lab.bounds.informed import informed

__all__ = ["informed"]
