"""Defects of adapters, of Gated DeltaNet, of states in host memory and of what is sent."""

from planting import Defect

LAYERS = [
    Defect(
        "an adapter is added without its scale",
        "actor/layers/lora.py",
        "        return add_product(output, low, self.spread(), self.scale)",
        "        return add_product(output, low, self.spread(), 1.0)",
        "actor/test_lora_peft.py::test_training_and_files_equal_peft",
    ),
    Defect(
        "adapters of experts are merged without their scale",
        "actor/layers/expert_lora.py",
        "addmm(b.float(), a.float(), alpha=self.scale)",
        "addmm(b.float(), a.float())",
        "actor/test_lora_peft.py::test_training_and_files_equal_peft",
    ),
    Defect(
        "gradients of an adapter's first factor are those of a rank's own tokens",
        "actor/layers/lora.py",
        '    partial: tuple[str, ...] = ("a",)\n',
        "    partial: tuple[str, ...] = ()\n",
        "actor/test_lora_layouts.py::test_two_processes_train_as_one",
    ),
    Defect(
        "adapters of experts are shifted by one expert",
        "actor/layers/expert_lora.py",
        "        return self.b.permute(2, 0, 1)",
        "        return self.b.permute(2, 0, 1).roll(1, 0)",
        "actor/test_lora_peft.py::test_training_and_files_equal_peft",
    ),
    Defect(
        "the gradient of a norm leaves out that the norm itself moves",
        "actor/layers/norm.py",
        ".addcmul_(x, share)",
        "",
        "actor/test_norm.py::test_a_norm_is_that_of_torch",
    ),
    Defect(
        "the gradient of padded keys goes to the rows of others",
        "actor/layers/causal_attention.py",
        "index_copy_(0, rows, real), None, None",
        "index_copy_(0, rows.flip(0), real), None, None",
        "actor/test_causal_attention.py::test_segments_padded_to_one_length_attend_as_each_alone",
    ),
    Defect(
        "attention of batches is joined in their order, not the pack's",
        "actor/layers/causal_attention.py",
        "            whole.index_copy_(0, of_pack, out.index_select(0, own))",
        "            whole.index_copy_(0, of_pack.flip(0), out.index_select(0, own))",
        "actor/test_causal_attention.py::test_segments_padded_to_one_length_attend_as_each_alone",
    ),
    Defect(
        "tokens travel with the code of the method that makes them again",
        "rlpipe/shared/number_arrays.py",
        "return _of_bytes, (type(self), bytes(self.content))",
        "return self._around, (self.array,)",
        "rlpipe/test_number_arrays.py::test_ray_writes_numbers_and_no_code",
    ),
    Defect(
        "a short convolution sees the sequence before",
        "actor/layers/gdn_torch.py",
        "torch.where(visible[:, None], shifted, 0)",
        "shifted",
        "actor/test_parity_gradients.py::test_no_sequence_touches_another",
    ),
    Defect(
        "the state of a recurrent layer is not passed on from chunk to chunk",
        "actor/layers/gdn_torch.py",
        "        state = kept[chunks] * state + key",
        "        state = key",
        "actor/test_model_layouts.py::test_the_chunked_delta_rule_equals_the_recurrence",
    ),
    Defect(
        "an optimizer in chunks corrects its moments as if each update were the first",
        "actor/streamed_adam.py",
        "torch.full((), float(applied_steps), device=self._device)",
        "torch.full((), 0.0, device=self._device)",
        "actor/test_streamed_adam.py::test_any_number_of_slots_gives_the_update_of_torch",
    ),
    Defect(
        "a chunk that left its slot is not written back to the host",
        "actor/streamed_adam.py",
        "            if position < len(self._chunks) - self.staying_slots:",
        "            if position == 0:",
        "actor/test_streamed_adam.py::test_any_number_of_slots_gives_the_update_of_torch",
    ),
    Defect(
        "second moments in bfloat16 are forgotten",
        "actor/adam.py",
        "        exp_avg_sq.copy_(moments[1])",
        "        pass",
        "actor/test_streamed_adam.py::test_moments_in_bfloat16_are_rounded_after_an_update_in_float32",
    ),
    Defect(
        "experts are sent by a process that has others",
        "actor/weight_plan.py",
        "return self.of(source)[part :: self.layout.expert_parallel]",
        "return self.of(source)[:1]",
        "actor/test_weight_plan.py::test_senders_hold_what_they_send",
    ),
]
