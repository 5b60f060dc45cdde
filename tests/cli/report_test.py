#!/usr/bin/env python3
"""What `dropkv run` reports: the JSON object, that its numbers agree with each other, and what the table says."""

import subprocess
import unittest

from command_line import PROGRAM, SECONDS, CommandLineTest, letters

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32  # of the model "plain"
RUN_FIELDS = {
    "policy": str, "budget": str, "window": int, "pool": str, "sink": int, "heads": str, "decode": str,
    "kept_tokens": dict, "kv_bytes_before": int, "kv_bytes_after": int, "prefill_s": float, "score_s": float,
    "compact_s": float, "decode_tokens_per_s": float, "output_error": float, "evicted_mass": float, "tokens": list,
    "text": str, "turns": list, "remarks": list,
}
DRAFTED = "window:8+draft:32@10%"  # by the default policy, and in what is compared with it


class Json(CommandLineTest):
    def test_fields(self):
        result = self.json("-f", self.document, "-p", "abc", "--compare", "full,snapkv")
        self.assertEqual(result["model"], "tiny random llama")
        self.assertEqual(result["n_layers"], LAYERS)
        self.assertEqual(result["prompt_tokens"], result["runs"][0]["kept_tokens"]["max"])
        self.assertEqual(result["question"], "seen")
        self.assertEqual([r["policy"] for r in result["runs"]], ["full", "dropkv-ahead", "snapkv"])
        self.assertEqual([r["rows"] for r in result["runs"]], [None, DRAFTED, DRAFTED])
        for run in result["runs"]:
            for name, kind in RUN_FIELDS.items():
                with self.subTest(policy=run["policy"], field=name):
                    no_setting = run["policy"] == "full" and name in ("window", "pool", "sink", "heads")
                    self.assertIsInstance(run[name], type(None) if no_setting else kind)
            self.assertEqual(set(run["kept_tokens"]), {"min", "mean", "max"})
            self.assertEqual(run["tokens"], run["turns"][0]["tokens"])
            self.assertGreater(run["decode_tokens_per_s"], 0)
            self.assertGreater(run["prefill_s"], 0)

    def test_kept_tokens_and_bytes_follow_the_budget(self):
        budgets = ["5%", "12.5%", "50%", "100%", "40", "1000"]
        result = self.json("-f", self.document, "--policy", "dropkv", "--compare", "adadropkv,streaming,random",
                           "--budget", ",".join(budgets))
        n = result["prompt_tokens"]
        self.assertEqual(len(result["runs"]), 4 * len(budgets))
        for run in result["runs"]:
            with self.subTest(policy=run["policy"], budget=run["budget"]):
                budget = run["budget"]
                wanted = int(float(budget[:-1]) / 100 * n + 1e-6) if budget.endswith("%") else int(budget)
                keep = min(n, max(wanted, run["window"] + run["sink"]))
                kept = run["kept_tokens"]
                self.assertEqual(kept["mean"], keep)
                if run["heads"] == "uniform":
                    self.assertEqual((kept["min"], kept["max"]), (keep, keep))
                else:
                    self.assertLessEqual(kept["min"], keep)
                    self.assertGreaterEqual(kept["max"], keep)
                    self.assertGreaterEqual(kept["min"], min(n, run["window"] + run["sink"]))
                row_bytes = LAYERS * KV_HEADS * 2 * HEAD_DIM * 2
                self.assertEqual(run["kv_bytes_before"], n * row_bytes)
                self.assertEqual(run["kv_bytes_after"], keep * row_bytes)
                self.assertEqual(run["output_error"] == 0, keep == n)
                self.assertTrue(0 <= run["evicted_mass"] <= 1)

    def test_error_falls_with_the_budget(self):
        runs = self.json("-f", self.document, "--budget", "5%,20%,50%,90%")["runs"]
        errors = [run["output_error"] for run in runs]
        self.assertEqual(errors, sorted(errors, reverse=True))
        self.assertGreater(errors[0], 0.1)

    def test_bytes_of_the_cache_types(self):
        bytes_of = {"f16": 2, "f32": 4, "q8_0": 34 / 32}
        for kind, size in bytes_of.items():
            with self.subTest(kind):
                run = self.one_run("-f", self.document, "--kv", kind, "--budget", "20%")
                self.assertEqual(run["kv_bytes_before"], 300 * LAYERS * KV_HEADS * 2 * HEAD_DIM * size)
                self.assertEqual(run["kv_bytes_after"] * 5, run["kv_bytes_before"])

    def test_bytes_that_are_not_utf8(self):
        document = self.write("bytes.bin", bytes(range(1, 256)) * 2)
        result = self.json("-f", document, "--raw")
        self.assertGreaterEqual(result["prompt_tokens"], 500)
        done = self.call(*self.run_arguments("--json", "-f", document, "-p", b"\xff\xfe"))
        self.assertEqual(done.returncode, 0)
        self.assertIn("\ufffd", done.stdout.decode())


class Remarks(CommandLineTest):
    WINDOW = ("--rows", "window:8")  # no draft, whose remark says how long it took

    def remarks(self, *arguments, model="plain"):
        arguments += self.WINDOW
        run = self.one_run(*arguments, model=model)
        text = "\n".join(run["remarks"])
        for remark in run["remarks"]:
            self.assertIn(f"note: {remark}\n", self.table(*arguments, model=model))
        return run, text

    def test_one_token(self):
        run, text = self.remarks("-p", "a", "--raw")
        self.assertEqual(run["kept_tokens"], {"min": 1, "mean": 1, "max": 1})
        self.assertIn("nothing evicted", text)

    def test_prompt_shorter_than_the_window(self):
        run, text = self.remarks("-p", "abcxyz", "--raw", "--window", "8")
        self.assertEqual(run["kv_bytes_before"], run["kv_bytes_after"])
        self.assertIn("nothing evicted: the prompt of", text)
        self.assertIn("window of 8", text)

    def test_percentage_below_window_and_sinks(self):
        run, text = self.remarks("-f", self.document, "--budget", "1%", "--sink", "4")
        self.assertEqual(run["kept_tokens"]["mean"], 12)
        self.assertIn("budget 1% raised to 12 tokens: window 8 and sinks 4", text)

    def test_no_draft_where_nothing_can_be_evicted(self):
        whole = self.one_run("-f", self.document, "--budget", "100%")
        self.assertEqual(whole["remarks"], ["nothing evicted: the budget keeps every token"])
        sliding = self.one_run("-p", letters(40), model="sliding")
        for run in (whole, sliding):
            self.assertNotIn("drafted", "\n".join(run["remarks"]))
            self.assertEqual(run["draft"]["tokens"], [])

    def test_whole_budget(self):
        run, text = self.remarks("-f", self.document, "--budget", "100%")
        self.assertEqual(run["output_error"], 0)
        self.assertIn("nothing evicted: the budget keeps every token", text)

    def test_nothing_to_say(self):
        self.assertEqual(self.one_run("-f", self.document, *self.WINDOW)["remarks"], [])

    def test_a_draft(self):
        remarks = self.one_run("-f", self.document)["remarks"]
        self.assertEqual(len(remarks), 1)
        self.assertRegex(remarks[0], r"^32 tokens drafted in \d+ ms from a cache of \d+\.\d MiB beside the full one$")

    def test_sliding_window_smaller_than_the_prompt(self):
        run, text = self.remarks("-f", self.document, model="sliding")
        self.assertIn("2 of 4 layers have a sliding window and were left alone", text)
        self.assertEqual(run["kept_tokens"]["mean"], 30)

    def test_sliding_window_larger_than_the_prompt(self):
        run, text = self.remarks("-p", letters(40), model="sliding")
        self.assertIn("nothing evicted: the prompt lies inside the model's sliding window", text)
        self.assertEqual(run["kv_bytes_before"], run["kv_bytes_after"])
        self.assertEqual(run["kept_tokens"]["mean"], 40)


class Table(CommandLineTest):
    def test_columns_and_settings(self):
        text = self.table("-f", self.document, "--compare", "full,snapkv", "--sink", "2")
        header = next(line for line in text.splitlines() if line.startswith("policy "))
        for column in ("kept min/mean/max", "KV MiB", "score ms", "of prefill", "tokens/s", "output error", "decode"):
            self.assertIn(column, header)
        self.assertIn(f"dropkv-ahead 10%: w 8, pool mean 3,20, sink 2, rows {DRAFTED}, ada\n", text)
        self.assertIn(f"snapkv 10%: w 8, pool mean 3,20 of the past, sink 2, rows {DRAFTED}, uniform\n", text)
        for heading in ("--- full 100% ---", "--- dropkv-ahead 10% ---", "--- snapkv 10% ---"):
            self.assertIn(heading, text)

    def test_resident_set_of_a_single_run(self):
        self.assertIn("resident set", self.table("-f", self.document))
        self.assertNotIn("resident set", self.table("-f", self.document, "--budget", "10%,20%"))

    def test_verdicts(self):
        answer = self.one_run("-f", self.document, "--prefix", "it is")["text"]
        for expected, verdict in (("IT IS", "right"), ("no such words", "WRONG")):
            arguments = ["-f", self.document, "--prefix", "it is", "--expect", expected]
            self.assertEqual(self.one_run(*arguments)["verdict"], verdict)
            self.assertIn(verdict, self.table(*arguments))
        self.assertIn('the answer is WRONG: "', self.table("-f", self.document, "--expect", "no such words"))
        self.assertNotIn("verdict", self.one_run("-f", self.document))
        self.assertGreater(len(answer), 0)

    def test_full_disk(self):
        with open("/dev/full", "wb") as full:
            for extra in ([], ["--json"]):
                done = subprocess.run([PROGRAM, *self.run_arguments("-f", self.document, *extra)], stdout=full,
                                      stderr=subprocess.PIPE, timeout=SECONDS)
                self.assertEqual(done.returncode, 1)
                self.assertTrue(done.stderr.endswith(b"dropkv: cannot write to standard output\n"), done.stderr)

    def test_progress_goes_to_standard_error(self):
        done = self.call(*self.run_arguments("-f", self.document))
        self.assertIn(b"prefill 300 / 300 tokens", done.stderr)
        self.assertNotIn(b"prefill 300 / 300", done.stdout)


class Help(CommandLineTest):
    def test_run_help_fits_a_screen(self):
        for flag in ("--help", "-h"):
            done = self.call("run", flag)
            lines = done.stdout.decode().splitlines()
            self.assertEqual((done.returncode, done.stderr), (0, b""))
            self.assertLessEqual(len(lines), 40)
            self.assertLessEqual(max(map(len, lines)), 120)

    def test_every_flag_is_in_the_help(self):
        text = self.call("run", "--help").stdout.decode()
        for flag in ("model file prompt budget policy window pool sink heads alpha decode kv fa ctx threads temp seed "
                     "max-tokens prefix expect question compare own-settings raw ignore-eos json").split():
            self.assertIn(f"--{flag}", text)

    def test_main_help_and_version(self):
        for argument in ("--help", "-h", "help"):
            done = self.call(argument)
            lines = done.stdout.decode().splitlines()
            self.assertEqual((done.returncode, done.stderr), (0, b""))
            self.assertTrue(0 < len(lines) <= 24 and max(map(len, lines)) <= 120)
        self.assertRegex(self.call("version").stdout.decode(), r"^dropkv \d+\.\d+\.\d+\n$")


if __name__ == "__main__":
    unittest.main()
