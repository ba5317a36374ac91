"""Selection of an algorithm for a collective operation.

The modules, lowest first: ``nbytes``; ``catalogue``, ``costs`` and ``layout``; ``cost_model`` and ``rules``;
``defaults`` and ``query``; ``selector`` and ``tuned_table``.
"""
