"""Parameter server: the weights and the optimizer are on server ranks, which workers pull from and push to.

A job has S server ranks and W worker ranks, S >= 1. The model is divided evenly among the servers, tensors cut where
that needs it. A worker pulls the weights, computes a gradient, and pushes it; the servers update the weights. It works
on numpy arrays, without torch, and on torch modules with any torch optimizer.

:class:`ParameterServer`
    a server rank: ``run``, or ``update_model`` for each update, and ``get_weights``
:class:`Worker`
    a worker rank: ``pull_weights``, ``push_gradients``, ``get_weights``
:class:`SGD`, :class:`Adam`
    update rules of numpy arrays

Example:
    >>> def program():
    ...     if mpicoll.world().rank == 0:
    ...         return ParameterServer(SGD(lr=0.5)).run()
    ...     weights = np.zeros(2)
    ...     with Worker({"w": weights}) as worker:
    ...         worker.push_gradients({"w": np.full(2, mpicoll.world().rank)})
    ...         worker.pull_weights()
    ...     return weights.tolist()
    >>> mpicoll.run_local(program, 3)
    [None, [-0.75, -0.75], [-0.75, -0.75]]
"""

from mpicoll.parallel.parameter_server.pull import Pull
from mpicoll.parallel.parameter_server.rules import SGD, Adam
from mpicoll.parallel.parameter_server.server import ParameterServer
from mpicoll.parallel.parameter_server.worker import Worker

__all__ = ["SGD", "Adam", "ParameterServer", "Pull", "Worker"]
