"""Imported where the extension in C was not compiled: Python prefers an extension to a module of the same name."""

raise ImportError("mpicoll was installed without it")
