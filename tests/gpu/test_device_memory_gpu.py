"""What the actor gives back really becomes free on the device, and comes back bit by bit."""

import pytest
import torch
from train_support import in_module_worker, run_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there memory can be counted")


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    path = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=512)).bfloat16().save_pretrained(path)
    return run_processes(1, in_module_worker, "memory_workers", "free_and_return", path)[0]


def test_memory_of_gradients_and_weights_becomes_free(answer):
    """What an update streams the optimizer's states through is given back, too, and is not taken again before one."""
    free, parameters = answer["free"], answer["parameters"]
    assert free["weights"][1] - free["all"][1] > 0.95 * 4 * parameters
    assert free["nothing"][0] - free["weights"][0] > 0.95 * 2 * parameters
    for held in ("all", "weights"):
        first, again = answer["allocated"][held]
        assert again - first < 0.2 * parameters


def test_weights_come_back_bit_by_bit_and_train_on(answer):
    for before, after in (answer["weights"], answer["logprobs"]):
        assert before == after
    assert answer["applied"]


def test_a_device_without_room_is_told_as_such():
    (said,) = run_processes(1, in_module_worker, "memory_workers", "short_of_memory")
    assert "train ran out of device memory" in said and "Tried to allocate" in said
