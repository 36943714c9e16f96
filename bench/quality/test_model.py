# SPDX-License-Identifier: Apache-2.0
"""The prefix attention against transformers' own, on a tiny random model. Needs torch and transformers."""

import copy
import unittest

try:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
except ImportError:
    torch = None

if torch is not None:
    from model import NAME, STATE, Model


@unittest.skipIf(torch is None, "torch and transformers are not installed")
class PrefixAttentionTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
        self.plain = Qwen2ForCausalLM(config).float().eval()
        for p in self.plain.parameters():
            p.data.mul_(3)  # sharp attention, so that a wrong mask or position shows
        self.model = Model.__new__(Model)
        own = Qwen2ForCausalLM(copy.deepcopy(config))  # the attention in use is a field of it
        own.load_state_dict(self.plain.state_dict())
        own.set_attn_implementation(NAME)
        self.model.model, self.model.device = own.float().eval(), "cpu"
        self.model.num_layers, self.model.H, self.model.HQ, self.model.d = 3, 2, 4, 16
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 97, (60,), generator=generator).tolist()

    def reference(self, ids):
        with torch.inference_mode():
            return self.plain(torch.tensor([ids])).logits[0]

    def prefix(self, ids):
        layers, sampled, logits = self.model.prefill(ids, 8, 4)
        return [(l[0].float(), l[1].float()) for l in layers], layers, sampled, logits

    def test_continuation_equals_one_pass(self):
        prefix, layers, sampled, logits = self.prefix(self.ids[:40])
        full = self.reference(self.ids)
        # float32 on both sides, other summation order: 1e-4 of logits of size 10.
        self.assertLess(float((logits - full[39]).abs().max()), 1e-3)
        got = self.model.log_probs(prefix, 40, self.ids[40:])
        self.assertLess(float((got - full[40:].log_softmax(-1)).abs().max()), 1e-3)
        self.assertEqual(list(layers[0][2].shape), [4, 8, 16])
        self.assertEqual(sampled.tolist(), [4, 12, 20, 28])

    def test_padded_rows_equal_single_rows(self):
        prefix, *_ = self.prefix(self.ids[:40])
        rows = [self.ids[40:47], self.ids[50:53], self.ids[44:45]]
        for row, best in zip(rows, self.model.forced(prefix, 40, rows)):
            self.assertEqual(best, self.reference(self.ids[:40] + row)[40:].argmax(-1).tolist())
        for row, out in zip(rows, self.model.greedy(prefix, 40, rows, 6, stop={-1})):
            ids = self.ids[:40] + row
            for _ in range(6):
                ids = ids + [int(self.reference(ids)[-1].argmax())]
            self.assertEqual(out, ids[40 + len(row) :])

    def test_compared_prefixes(self):
        prefix, *_ = self.prefix(self.ids[:40])
        worse = [(k, v * 0.9) for k, v in prefix]  # at most a tenth of the output is off, less where the tail is attended
        rows = [self.ids[40:47], self.ids[50:53]]
        plain = self.model.forced(prefix, 40, rows)
        try:
            STATE.compared = [prefix, worse]
            compared = self.model.forced(prefix, 40, rows)
            errors = dict(STATE.errors)
            STATE.compared = [worse]
            self.model.forced(prefix, 40, [rows[1]])
            alone = dict(STATE.errors)
            self.model.forced(prefix, 40, [rows[1], rows[1]])
        finally:
            STATE.compared = None
        self.assertEqual(plain, compared)
        self.assertEqual(sorted(errors), [0, 1, 2])
        for layer in range(3):
            self.assertEqual(errors[layer][0], 0.0)
            self.assertTrue(1e-4 < errors[layer][1] < 0.0101, errors[layer])
            self.assertAlmostEqual(STATE.errors[layer][0], alone[layer][0], places=6)  # rows count alike
        STATE.errors = {}

    def test_shorter_prefix_keeps_positions(self):
        prefix, *_ = self.prefix(self.ids[:40])
        # Dropped tokens with zero weight: a prefix whose second half is pushed away equals the first half alone.
        kept = [(k[:, :20], v[:, :20]) for k, v in prefix]
        a = self.model.log_probs(kept, 40, self.ids[40:50])
        b = self.model.log_probs(kept, 20, self.ids[40:50])
        self.assertGreater(float((a - b).abs().max()), 1e-2)  # rotary positions count from the true length


if __name__ == "__main__":
    unittest.main()
