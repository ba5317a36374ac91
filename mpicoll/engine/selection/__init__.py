"""Selection of an algorithm for a collective operation.

The modules, lowest first: ``nbytes`` and ``trials``; ``catalogue``, ``costs`` and ``layout``; ``cost_model`` and
``rules``; ``defaults`` and ``query``; ``selector`` and ``tuned_table``; ``candidates``.
"""
