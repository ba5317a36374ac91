"""Process groups for versions of torch in which c10d can't call a backend in Python.

No other module of mpicoll needs this package, except :mod:`mpicoll.legacy_autoload`, which names its modules.
"""
