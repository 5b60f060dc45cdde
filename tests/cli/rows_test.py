#!/usr/bin/env python3
"""Rows behind the prompt: drafts and delays of `dropkv run`, and those and oracle rows of `dropkv eval`."""

import json
import shutil
import unittest

from command_line import CommandLineTest, letters


def kept(run):
    return run["kept_tokens"], run["output_error"]


class Draft(CommandLineTest):
    ROWS = ("--rows", "window:8+draft:4")

    def test_it_judges_and_says_so(self):
        arguments = ("-f", self.document, "-p", "abc xyz", "--budget", "10%", "--policy", "dropkv")
        plain = self.one_run(*arguments)
        run = self.one_run(*arguments, *self.ROWS)
        self.assertEqual((plain["rows"], plain["judged_by_generated"]), ("window:8", 0))
        self.assertNotIn("draft", plain)
        self.assertEqual(run["rows"], "window:8+draft:4@10%")
        self.assertEqual(len(run["draft"]["tokens"]), 4)
        self.assertEqual(run["judged_by_generated"], 4)
        self.assertEqual(run["kept_tokens"], plain["kept_tokens"])
        self.assertNotEqual(run["output_error"], plain["output_error"])
        self.assertTrue(0 < run["draft"]["kv_bytes"] < run["kv_bytes_before"] / 5)
        self.assertIn("4 tokens drafted", " ".join(run["remarks"]))

    def test_the_draft_is_the_answer_from_its_budget(self):
        arguments = ("-f", self.document, "-p", "abc xyz", "--policy", "snapkv", "--max-tokens", "6")
        run = self.one_run(*arguments, "--budget", "50%", "--rows", "window:8+draft:6@30", "--window", "8")
        draft = self.one_run(*arguments, "--budget", "30", "--window", "8")["tokens"]
        self.assertEqual(run["draft"]["tokens"], draft)
        plain = self.one_run(*arguments, "--budget", "50%", "--window", "8")
        self.assertNotEqual(plain["tokens"], draft)

    def test_it_leaves_no_trace(self):
        """With everything kept the answer is the full cache's, sampled ones too: no random number is drawn for it."""
        for model in ("plain", "sliding"):
            for sampled in ((), ("--temp", "1.5", "--seed", "7")):
                arguments = ("-f", self.document, "-p", "abc", "--kv", "f32", "--fa", "off", "--max-tokens", "12")
                runs = self.json(*arguments, *sampled, "--budget", "100%,20%", "--compare", "full", *self.ROWS,
                                 model=model)["runs"]
                self.assertEqual([run["budget"] for run in runs], ["100%", "100%", "20%"])
                self.assertEqual(runs[0]["tokens"], runs[1]["tokens"], (model, sampled))

    def test_hidden_question(self):
        runs = self.json("-f", self.document, "-p", "abc", "-p", "xyz", "--question", "hidden", "--budget", "10%,20%",
                         *self.ROWS)["runs"]
        for run in runs:
            self.assertEqual(len(run["turns"]), 2)
            self.assertEqual(run["judged_by_generated"], 4)

    def test_compared_policies_share_the_rows(self):
        runs = self.json("-f", self.document, "-p", "abc", "--budget", "20%", "--policy", "dropkv", "--compare",
                         "snapkv,knorm,tova", *self.ROWS)["runs"]
        self.assertEqual({run["policy"]: run["rows"] for run in runs},
                         {"dropkv": "window:8+draft:4@10%", "snapkv": "window:8+draft:4@10%", "knorm": None,
                          "tova": "window:1+draft:4@10%"})
        alone = self.one_run("-f", self.document, "-p", "abc", "--budget", "20%", "--policy", "knorm")
        self.assertEqual(kept(runs[2]), kept(alone))

    def test_presets(self):
        for name, rows in (("laq", "draft:8@same"), ("laq++", "window:8+draft:8@same@w32")):
            run = self.one_run("-f", self.document, "-p", "abc", "--budget", "20%", "--policy", name)
            self.assertEqual(run["rows"], rows)
            self.assertEqual(run["judged_by_generated"], 8)

    def test_refused(self):
        def refused(*arguments, flag="--rows", part):
            self.refused(self.run_arguments("-f", self.document, "-p", "a", *arguments), flag, part)

        refused("--rows", "draft:8", "--policy", "knorm", part="knorm, which reads keys and values")
        refused("--rows", "draft:65", part="1 to 64")
        refused("--rows", "draft:8+delay:8", part="one of delay, draft and oracle")
        refused("--rows", "oracle:8", part="got oracle")
        refused("--rows", "delay:8", "--question", "hidden", part="there is no answer yet")
        refused("--rows", "window:8+draft:8", "--window", "9", part="the window of --window, 9")
        refused("--policy", "laq", "--budget", "3", flag="--budget", part="expected at least 32")
        refused("--rows", "draft:8@5", flag="--budget", part="expected at least 8")


class Delay(CommandLineTest):
    def test_the_cut_comes_later(self):
        """The first token comes from the prompt's logits, so many more from the full cache."""
        arguments = ("-f", self.document, "-p", "abc xyz", "--max-tokens", "20")
        full = self.one_run(*arguments, "--policy", "full")["tokens"]
        at_once = self.one_run(*arguments, "--policy", "dropkv", "--budget", "4%")["tokens"]
        self.assertNotEqual(at_once[:8], full[:8])
        run = self.one_run(*arguments, "--policy", "dropkv", "--budget", "4%", "--rows", "window:8+delay:7")
        self.assertEqual(run["tokens"][:8], full[:8])
        self.assertNotEqual(run["tokens"], full)
        self.assertEqual(run["judged_by_generated"], 7)
        self.assertEqual(run["decode"], "native")
        self.assertEqual(run["kept_tokens"]["max"], 4 * 321 // 100)  # of the prompt; the seven come on top

    def test_a_short_answer_is_the_full_caches(self):
        arguments = ("-f", self.document, "-p", "abc", "--max-tokens", "5", "--budget", "10%,20%", "--compare", "full")
        for rows in ("delay:5", "window:8+delay:60"):
            runs = self.json(*arguments, "--policy", "dropkv", "--rows", rows)["runs"]
            for run in runs[1:]:
                self.assertEqual(run["tokens"], runs[0]["tokens"])
                self.assertIn("ended within the delay", run["remarks"][0])
                self.assertEqual(run["kv_bytes_after"], run["kv_bytes_before"])

    def test_sampled_answers_keep_what_was_shown(self):
        arguments = ("-f", self.document, "-p", "abc", "--max-tokens", "12", "--temp", "1.2", "--seed", "3")
        full = self.one_run(*arguments, "--policy", "full")["tokens"]
        for heads in ("uniform", "ada"):
            run = self.one_run(*arguments, "--policy", "dropkv", "--heads", heads, "--budget", "5%", "--rows", "delay:4")
            self.assertEqual(run["tokens"][:5], full[:5])
            self.assertEqual(len(run["tokens"]), 12)

    def test_a_further_turn_brings_it_forward(self):
        runs = self.json("-f", self.document, "-p", "abc", "-p", "xyz", "--max-tokens", "5", "--budget", "10%,20%",
                         "--policy", "dropkv", "--rows", "delay:40")["runs"]
        for run in runs:
            self.assertEqual(run["judged_by_generated"], 4)  # the fifth was shown, and fed with the next question
            self.assertEqual([len(turn["tokens"]) for turn in run["turns"]], [5, 5])


class Evaluation(CommandLineTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        lines = [json.dumps({"index": i, "task": "made", "context": letters(250 + 10 * i, seed=i + 1),
                             "question": letters(20, seed=i + 50), "outputs": ["a"], "max_tokens": 12}) for i in range(2)]
        cls.samples = cls.write("samples.jsonl", "\n".join(lines) + "\n")

    def evaluate(self, name, *arguments, model="chat", suite=None):
        out = self.folder / f"{self.id()}.{name}"
        self.addCleanup(shutil.rmtree, out, ignore_errors=True)
        done = self.call("eval", "-m", self.model(model), "--suite", suite or self.samples, "--out", str(out),
                         "--threads", "1", "--ignore-eos", "--budgets", "8%,30%", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]

    SOURCES = ("--rows", "window:8,window:8+draft:4,draft:4,window:8+draft:3@20%@x2", "--rows", "window:8+delay:5", "--rows", "oracle:12")

    def test_every_source_with_every_pooling(self):
        rows = self.evaluate("a", "--policies", "dropkv,knorm", *self.SOURCES, "--pool", "1", "--pool", "2,5")
        names = ["dropkv", "dropkv window:8+draft:4@10%", "dropkv draft:4@10%", "dropkv window:8+draft:3@20%@x2", "dropkv window:8+delay:5",
                 "dropkv oracle:12"]
        expected = [f"{name} k={pool}" for name in names for pool in ("1", "2,5")] + ["knorm"]
        self.assertEqual([row["setting"] for row in rows[1:2 * len(expected):2]], expected)
        self.assertEqual(len(rows), 2 * (1 + 2 * len(expected)))
        errors = {}
        for row in rows:
            behind = row["setting"].split(" k=")[0] in names[1:]
            self.assertEqual("rows" in row, behind)
            self.assertEqual("draft_s" in row, behind)
            if "rows" in row:
                self.assertIn(row["rows"], row["setting"])
            errors.setdefault((row["id"], row["budget"]), []).append(row["output_error"])
        for of_sample in errors.values():
            self.assertEqual(len(set(of_sample)), len(of_sample))  # every source kept something else

    def test_together_as_alone(self):
        for model in ("chat", "sliding"):
            arguments = ("--policies", "dropkv,adadropkv", *self.SOURCES, "--fidelity", "12", "--kv", "f32", "--fa", "off")
            alone = self.evaluate("alone" + model, *arguments, "--batch", "1", model=model)
            together = self.evaluate("together" + model, *arguments, "--batch", "16", model=model)
            self.assertEqual(len(alone), 2 * (1 + 2 * 2 * 6))
            for one, other in zip(alone, together):
                for field in ("setting", "budget", "answer", "score", "kept", "top1"):
                    self.assertEqual(one.get(field), other.get(field), (model, one["setting"], one["budget"]))
                self.assertAlmostEqual(one.get("kl", 0), other.get("kl", 0), delta=1e-4)

    def test_answers_are_those_of_run(self):
        context = letters(200, seed=9)
        sample = self.write("one.jsonl", json.dumps({"task": "made", "context": context + "\n\n", "question": "xyz abc",
                                                     "outputs": ["a"], "max_tokens": 12}))
        document = self.write("context.txt", context)
        for rows in ("window:8+draft:5", "draft:5@40%", "window:8+draft:5@x3", "window:8+delay:5"):
            evaluated = self.evaluate(rows, "--policies", "dropkv,adadropkv", "--rows", rows, "--batch", "1", suite=sample)
            for policy in ("dropkv", "adadropkv"):
                runs = self.json("-f", document, "-p", "xyz abc", "--max-tokens", "12", "--policy", policy, "--budget",
                                 "8%,30%", "--rows", rows, model="chat")["runs"]
                of_policy = [row["answer"] for row in evaluated if row["policy"] == policy]
                self.assertEqual([run["text"] for run in runs], of_policy, (rows, policy))

    def test_a_delay_begins_with_the_full_caches_tokens(self):
        rows = self.evaluate("a", "--policies", "dropkv", "--rows", "delay:6", "--rows", "delay:12,delay:20", "--fidelity",
                             "12")
        full = {row["id"]: row for row in rows if row["setting"] == "full"}
        differ = 0
        for row in rows:
            whole = full[row["id"]]
            if row["setting"] == "dropkv delay:6":
                self.assertEqual(row["answer"][:5], whole["answer"][:5])
                self.assertEqual(row["answer_tokens"], 12)
                self.assertGreater(row["kl"], 0)
                differ += row["answer"] != whole["answer"]
            elif row["setting"] != "full":  # the answer ends first
                self.assertEqual((row["answer"], row["score"], row["decode"]), (whole["answer"], whole["score"], "full"))
                self.assertNotIn("kl", row)
        self.assertGreater(differ, 0)

    def test_a_killed_run_goes_on(self):
        """Also where the full cache's row is there, whose answer some rows ask."""
        arguments = ("--policies", "dropkv", *self.SOURCES, "--batch", "1")
        rows = self.evaluate("a", *arguments)
        out = self.folder / f"{self.id()}.b"
        shutil.copytree(self.folder / f"{self.id()}.a", out)
        lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
        for left in (1, 6, 8):
            (out / "results.jsonl").write_text("".join(lines[:left]))
            again = self.evaluate("b", *arguments)
            self.assertEqual([(row["setting"], row["answer"], row["kept"]) for row in again],
                             [(row["setting"], row["answer"], row["kept"]) for row in rows])

    def test_text(self):
        text = self.write("text.txt", letters(500))
        rows = self.evaluate("a", "--length", "200", "--fidelity", "16", "--policies", "dropkv", "--rows",
                             "draft:4,delay:6,oracle:16", model="bos", suite=text)
        for row in rows:
            if row["setting"] != "full":
                self.assertGreater(row["kl"], 0)

    def test_refused(self):
        def refused(part, *arguments):
            self.refused(["eval", "-m", self.model("chat"), "--suite", self.samples, "--out", "unused", *arguments],
                         "--rows", part)

        refused("expected window or draft with --question hidden", "--question", "hidden", "--rows", "oracle:4")
        refused("knorm, which reads keys and values", "--policies", "knorm", "--rows", "draft:4")
        refused("such as window:8+draft:8@10%", "--rows", "window:8,drafts:4")
        self.refused(["eval", "-m", self.model("chat"), "--suite", self.document, "--out", "unused", "--fidelity", "8",
                      "--rows", "delay:8"], "--rows", "below the 8 tokens of --fidelity")


if __name__ == "__main__":
    unittest.main()
