"""Selection of an algorithm for a collective operation.

The modules, lowest first: ``nbytes`` and ``layout``, ``catalogue`` and ``cost_model``, ``rules``, ``defaults``,
``query``, ``selector`` and ``tuned_table``.
"""
