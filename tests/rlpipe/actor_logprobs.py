"""Log-probabilities by the actor of a checkpoint: `python actor_logprobs.py RUN CHECKPOINT < SEQUENCES > LOGPROBS`.

SEQUENCES is a JSON list of [prompt ids, response ids]; LOGPROBS has one list of numbers for each.
"""

import json
import sys
from pathlib import Path

from actor import distributed
from actor.checkpoint import Checkpointer
from actor.megatron_patches.optimizer_fixes import install_optimizer_fixes
from actor.runtime import install_megatron_runtime
from actor.trainer import Trainer
from actor.worker import trainer_options
from rlpipe.batching import supervised_sequence
from rlpipe.batching.pack_plan import flops_cost
from rlpipe.config.load import load_config
from rlpipe.supervised.supervised_packs import supervised_packs

config = load_config(Path(sys.argv[1]) / "config.yaml")
install_megatron_runtime()
install_optimizer_fixes()
distributed.join_processes(distributed.open_store("127.0.0.1", 1, 60), 0, 1, 60)
distributed.start_model_parallel(config.actor, seed=0)
trainer = Trainer(trainer_options(config))
Checkpointer(trainer, keep=1).load(Path(sys.argv[2]))
answers = []
for number, (prompt, response) in enumerate(json.load(sys.stdin)):
    sequence = supervised_sequence(str(number), prompt, response)
    packs = supervised_packs([sequence], config.actor, data_parallel=1, cost=flops_cost(config.model.path))
    ((pack,),) = packs.ranks[0]
    (logprobs,) = trainer.logprobs([pack], "policy")
    answers.append(logprobs[pack.loss_mask > 0].tolist())
distributed.leave()
json.dump(answers, sys.stdout)
