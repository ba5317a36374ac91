"""Checkpoints that can be loaded at another layout: other numbers of shards, stages and copies, also in one process.

The files are those of torch's distributed checkpoint (:mod:`torch.distributed.checkpoint`, DCP), with the keys
``model.<name>``, ``optimizer.state.<name>.<entry>``, ``optimizer.param_groups.<name>.<option>`` (as torch flattens an
optimizer's state), ``extra_states.<name>`` and ``extra``. So ``torch.distributed.checkpoint.load`` reads them, too.
They hold full parameters; loading takes the part that the current layout needs. The extra states of modules
(``get_extra_state``) and ``extra`` are bytes of ``torch.save``: DCP would divide a dict, and load only keys that the
new module has, too.

Parts of a model on several ranks are related by names. Under pipeline parallelism each rank has its parameters under
the names of its local module; `names` maps them to those of the full model, and must map the copies of a tied parameter
to one name. Without it names are used unchanged, which is right if the names of stages differ already. A parameter that
a module has under several names is saved under the first.
"""

from mpicoll.parallel.checkpoint.files import load, save
from mpicoll.parallel.checkpoint.state import model_state, optimizer_state

__all__ = ["load", "model_state", "optimizer_state", "save"]
