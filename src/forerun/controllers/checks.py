"""Moved."""

from forerun.checks import between, choice, flag, whole

__all__ = ["between", "choice", "flag", "whole"]
