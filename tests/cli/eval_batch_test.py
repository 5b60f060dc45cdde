#!/usr/bin/env python3
"""How far `dropkv eval` is from the full cache, and keep lists decoded together against each alone."""

import unittest

from command_line import letters
from eval_case import EvalTest


class Fidelity(EvalTest):
    def test_whole_budget_is_the_full_cache(self):
        for model in ("chat", "bos"):
            for mode in ("seen", "hidden"):
                rows = self.evaluate(self.out(model + mode), "--fidelity", "5", "--budgets", "100%", "--kv", "f32",
                                     "--fa", "off", "--question", mode, model=model)
                for row in rows:
                    if row["setting"] == "full":
                        self.assertNotIn("kl", row)
                    else:
                        self.assertLess(row["kl"], 1e-6)
                        self.assertEqual(row["top1"], 1)

    def test_small_budgets_are_farther_from_it(self):
        rows = self.evaluate(self.out("a"), "--fidelity", "5", "--budgets", "5%,60%")
        for small, large in zip(rows, rows[1:]):
            if small["budget"] == "5%" and large["budget"] == "60%":
                self.assertGreater(small["kl"], 0)
                self.assertTrue(0 <= small["top1"] <= 1)
        mean = {budget: sum(row["kl"] for row in rows if row["budget"] == budget) for budget in ("5%", "60%")}
        self.assertGreater(mean["5%"], mean["60%"])

    def test_it_changes_no_answer(self):
        with_it = self.evaluate(self.out("a"), "--fidelity", "6")
        without = self.evaluate(self.out("b"))
        self.assertEqual([row["answer"] for row in with_it], [row["answer"] for row in without])
        self.assertNotIn("kl", without[1])

    def test_text(self):
        text = self.write("text.txt", letters(700))
        rows = self.evaluate(self.out("a"), "--length", "200", "--fidelity", "16", "--budgets", "20%", model="bos",
                             suite=text)
        self.assertEqual([row["id"] for row in rows], ["0"] * 3 + ["1"] * 3 + ["2"] * 3)
        for row in rows:
            self.assertEqual((row["task"], row["length"], row["prompt_tokens"], row["answer_tokens"]),
                             ("text", 200, 184, 16))
            self.assertEqual(row["answer"], "")
            self.assertEqual(row["score"], 1 if row["setting"] == "full" else row["top1"])
        self.assertGreater(rows[1]["kl"], 0)
        whole = self.evaluate(self.out("b"), "--length", "200", "--fidelity", "16", "--budgets", "100%", "--kv", "f32",
                              "--fa", "off", model="bos", suite=text)
        self.assertLess(max(row["kl"] for row in whole if row["setting"] != "full"), 1e-6)


class Batch(EvalTest):
    """Lists that are decoded together give what each one gives alone."""

    def alike(self, *arguments, tolerance, **settings):
        rows = {}
        for batch in ("1", "3", "8", "16"):
            rows[batch] = self.evaluate(self.out(f"{batch}{settings}"), *arguments, "--batch", batch, **settings)
            self.assertEqual({row.pop("decode") for row in rows[batch] if row["setting"] != "full"} == {"ragged batch"},
                             batch != "1")
            self.assert_alike(rows[batch], rows["1"], tolerance)
        return rows["1"]

    def test_answers_scores_and_fidelity(self):
        arguments = ("--policies", "dropkv,adadropkv,streaming", "--budgets", "8%,40%", "--question", "seen,hidden",
                     "--fidelity", "5")
        for model in ("chat", "bos", "sliding"):
            with self.subTest(model=model):
                exact = ("--kv", "f32", "--fa", "off") if model == "sliding" else ()
                rows = self.alike(*arguments, *exact, tolerance=1e-3, model=model)
                self.assertEqual(len(rows), 2 * 3 * (1 + 3 * 2))
                self.assertGreater(len({row["answer"] for row in rows if row["setting"] != "full"}), 6)
                self.assertGreater(max(row.get("kl", 0) for row in rows), 0.05)
                # Some leave the full cache's answer, so that its rest is forced.
                full = {(row["id"], row["hidden"]): row["answer"] for row in rows if row["setting"] == "full"}
                self.assertTrue(any(row["answer"] != full[row["id"], row["hidden"]] for row in rows))

    def test_without_rounding(self):
        self.alike("--fidelity", "5", "--kv", "f32", "--fa", "off", "--question", "seen,hidden", tolerance=1e-5)

    def test_text(self):
        text = self.write("text.txt", letters(700))
        rows = self.alike("--length", "200", "--fidelity", "16", "--budgets", "20%,50%", tolerance=1e-3, model="bos",
                          suite=text)
        self.assertEqual(len(rows), 3 * (1 + 2 * 2))

    def test_answers_of_uneven_length(self):
        """They end where the model says so, some lists of a batch long before others."""
        samples = self.write_samples("long.jsonl", 3, max_tokens=150)
        rows = self.alike("--policies", "dropkv,adadropkv,streaming", "--budgets", "8%,20%,40%", "--fidelity", "150",
                          "--kv", "f32", "--fa", "off", tolerance=1e-5, suite=samples, ignore_eos=False)
        lengths = {i: {row["answer_tokens"] for row in rows if row["id"] == i} for i in "012"}
        self.assertTrue(any(len(of) > 2 and max(of) == 150 for of in lengths.values()), lengths)

    def test_the_record_says_it_and_another_one_goes_on(self):
        out = self.out("a")
        self.evaluate(out, "--samples", "1")
        self.assertEqual(self.record(out)["batch"], 16)
        before = self.lines(out)
        self.evaluate(out, "--batch", "2")
        self.assertEqual(self.record(out)["batch"], 2)
        self.assertEqual(self.lines(out)[:len(before)], before)
        self.assertEqual(len(self.lines(out)), 3 * 5)


if __name__ == "__main__":
    unittest.main()
