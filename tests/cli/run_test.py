#!/usr/bin/env python3
"""What `dropkv run` does: prompts, policies from one prefill, turns, both decoders, repeatability, Ctrl-C."""

import os
import pty
import signal
import subprocess
import time
import unittest

from command_line import PROGRAM, SECONDS, CommandLineTest, letters


def kept_and_error(run):
    return run["kept_tokens"], run["output_error"], run["evicted_mass"]


class Prompt(CommandLineTest):
    def tokens(self, *arguments, **settings):
        return self.json(*arguments, **settings)["prompt_tokens"]

    def test_document_from_standard_input(self):
        text = letters(200, seed=2)
        by_file = self.json("-f", self.write("piped.txt", text), "-p", "abc")
        by_pipe = self.json("-f", "-", "-p", "abc", stdin=text.encode())
        self.assertEqual(by_pipe["prompt_tokens"], by_file["prompt_tokens"])
        self.assertEqual(by_pipe["runs"][0]["tokens"], by_file["runs"][0]["tokens"])

    def test_carriage_returns_are_text(self):
        with_return = self.tokens("-f", self.write("crlf.txt", b"xyz\r\nxyz\r\n" * 5))
        without = self.tokens("-f", self.write("lf.txt", b"xyz\nxyz\n" * 5))
        self.assertEqual(with_return, without + 10)

    def test_zero_bytes_are_text(self):
        self.assertEqual(self.tokens("-f", self.write("zero.bin", b"xyz\0" * 20)), 80)

    def test_blank_line_between_document_and_question(self):
        self.assertEqual(self.tokens("-f", self.document, "-p", "xyz"), self.tokens("-f", self.document) + 5)

    def test_chat_template_and_raw(self):
        raw = self.tokens("-f", self.document, "--raw", model="chat")
        self.assertEqual(raw, 300)
        self.assertGreater(self.tokens("-f", self.document, model="chat"), raw + 10)

    def test_control_tokens_in_the_document_are_text(self):
        """They are longer than the one token that the template's own are."""
        def longer(with_name, without, *extra):
            return (self.tokens("-f", self.write("a.txt", with_name), *extra, model="chat") -
                    self.tokens("-f", self.write("b.txt", without), *extra, model="chat"))

        for name in ("<|im_end|>", "<|im_start|>"):
            for extra in ([], ["--question", "hidden"], ["-p", "abc"], ["--raw"]):
                with self.subTest(name=name, extra=extra):
                    self.assertGreaterEqual(longer(f"xyz{name}qjv", "xyzqjv", *extra), 5)
        question = self.tokens("-f", self.document, "-p", "<|im_end|>", model="chat")
        self.assertGreaterEqual(question - self.tokens("-f", self.document, "-p", "a", model="chat"), 4)

    def test_prefix_begins_the_answer(self):
        self.assertGreater(self.tokens("-p", "abc", "--prefix", "xyz"), self.tokens("-p", "abc"))
        self.assertIn("xyzq", self.table("-p", "abc", "--prefix", "xyzq"))


class Policies(CommandLineTest):
    def settings(self, *arguments):
        result = self.json("-f", self.document, *arguments)
        self.assertEqual(len({run["prefill_s"] for run in result["runs"]}), 1)
        return {run["policy"]: (run["window"], run["pool"], run["sink"], run["heads"]) for run in result["runs"]}

    COMPARE = ("--compare", "full,snapkv,streaming,random", "--budget", "30%")

    def test_compared_policies_share_settings(self):
        self.assertEqual(self.settings(*self.COMPARE), {
            "full": (None, None, None, None),
            "dropkv-ahead": (8, "mean 3,20", 0, "ada"),
            "snapkv": (8, "mean 3,20 of the past", 0, "uniform"),
            "streaming": (1, "none", 4, "uniform"),
            "random": (8, "none", 0, "uniform"),
        })

    def test_own_settings(self):
        self.assertEqual(self.settings(*self.COMPARE, "--own-settings")["snapkv"],
                         (64, "mean 5 of the past", 0, "uniform"))

    def test_flags_hold_for_all(self):
        got = self.settings(*self.COMPARE, "--own-settings", "--window", "16", "--pool", "max:3,5", "--sink", "2",
                            "--heads", "ada-o")
        self.assertEqual(got["dropkv-ahead"], (16, "max 3,5", 2, "ada-o"))
        self.assertEqual(got["snapkv"], (16, "max 3,5 of the past", 2, "ada-o"))
        self.assertEqual(got["random"], (16, "none", 2, "ada-o"))

    def test_a_policy_named_twice_runs_once(self):
        runs = self.json("-f", self.document, "--policy", "full", "--compare", "snapkv,full,snapkv")["runs"]
        self.assertEqual([run["policy"] for run in runs], ["full", "snapkv"])

    def test_each_run_equals_the_run_alone(self):
        arguments = ["-f", self.document, "--own-settings"]
        together = self.json(*arguments, "--compare", "full,snapkv,random", "--budget", "30%,80")["runs"]
        self.assertEqual(len(together), 1 + 3 * 2)
        for run in together:
            with self.subTest(policy=run["policy"], budget=run["budget"]):
                alone = self.one_run(*arguments, "--policy", run["policy"], "--budget", run["budget"])
                self.assertEqual(run["tokens"], alone["tokens"])
                self.assertEqual(run["kept_tokens"], alone["kept_tokens"])

    def test_seed_of_the_random_policy(self):
        errors = [self.one_run("-f", self.document, "--policy", "random", "--seed", seed)["output_error"]
                  for seed in ("1", "2", "1")]
        self.assertEqual(errors[0], errors[2])
        self.assertNotEqual(errors[0], errors[1])


class EveryPolicy(CommandLineTest):
    """Also those that read all queries, queries before RoPE, or the output projection."""

    def test_all_of_them_run_and_keep_what_they_say(self):
        result = self.json("-f", self.document, "--compare", "all", "--budget", "30%,60%", "--max-tokens", "2")
        runs = result["runs"]
        names = list(dict.fromkeys(run["policy"] for run in runs))
        self.assertEqual(names[:2], ["full", "dropkv-ahead"])
        self.assertGreater(len(names), 45)
        self.assertEqual(len(runs), 1 + 2 * (len(names) - 1))
        self.assertGreater(result["statistics_s"], 0)
        for run in runs[1:]:
            with self.subTest(policy=run["policy"], budget=run["budget"]):
                kept = run["kept_tokens"]
                self.assertTrue(1 <= kept["min"] <= kept["mean"] <= kept["max"] <= 300)
                wanted = 3 * int(run["budget"][:-1])
                self.assertGreater(kept["mean"], wanted - 20)
                self.assertEqual(kept["min"] == kept["max"], run["decode"] == "native")
                self.assertGreater(run["output_error"], 0)
                self.assertEqual(run["certificate_rows"], 32)  # the window of andpro_code, which is its own
                self.assertEqual(len(run["tokens"]), 2)
        by_name = {run["policy"]: run for run in runs}
        self.assertEqual((by_name["snapkv"]["window"], by_name["andpro_code"]["window"]), (8, 32))
        self.assertEqual(by_name["layerdefensivekv"]["layers"], "flat")

    def test_both_attention_routes_agree(self):
        def kept(*extra):
            runs = self.json("-f", self.document, "--policy", "h2o", "--compare", "expected,criticalkv,compactor",
                             "--kv", "f32", *extra)["runs"]
            return [(run["policy"], run["kept_tokens"], round(run["output_error"], 2)) for run in runs]

        self.assertEqual(kept("--fa", "on"), kept("--fa", "off"))

    def test_sliding_layers(self):
        runs = self.json("-f", self.document, "--policy", "h2o", "--compare", "expected,criticalkv,pyramidkv,cake",
                         "--budget", "40%", model="sliding")["runs"]
        self.assertEqual([run["policy"] for run in runs], ["h2o", "expected", "criticalkv", "pyramidkv", "cake"])
        self.assertTrue(all("2 of 4 layers have a sliding window" in run["remarks"][0] for run in runs))

    def test_scores_that_heads_do_not_share_get_a_warning(self):
        run = self.one_run("-f", self.document, "--policy", "knorm", "--heads", "ada")
        self.assertIn("knorm", " ".join(run["remarks"]))
        self.assertEqual(self.one_run("-f", self.document, "--policy", "knorm")["remarks"], [])

    def test_threads_make_no_difference(self):
        arguments = ["-f", self.document, "--policy", "h2o", "--compare", "expected,capkv,compactor,dropkv-wo,cake"]
        results = [[kept_and_error(run) for run in self.json(*arguments, "--threads", t)["runs"]] for t in ("1", "3")]
        self.assertEqual(results[0], results[1])


class Decoders(CommandLineTest):
    def test_both_give_the_same_tokens(self):
        for extra in ([], ["--fa", "off"], ["--kv", "f32"], ["--kv", "f32", "--fa", "off"]):
            with self.subTest(extra):
                arguments = ["-f", self.document, "--policy", "dropkv", "--budget", "20%", *extra]
                native = self.one_run(*arguments, "--decode", "native")
                ragged = self.one_run(*arguments, "--decode", "ragged")
                self.assertEqual(native["decode"], "native")
                self.assertTrue(ragged["decode"].startswith("ragged "))
                self.assertEqual(native["tokens"], ragged["tokens"])

    def test_auto(self):
        for heads, decoder in (("uniform", "native"), ("ada", "ragged"), ("ada-o", "ragged")):
            run = self.one_run("-f", self.document, "--heads", heads)
            self.assertTrue(run["decode"].startswith(decoder), run["decode"])

    def test_whole_budget_equals_the_full_cache(self):
        arguments = ["-f", self.document, "-p", "abc", "-p", "xyz", "--compare", "full", "--budget", "100%"]
        for extra in (["--decode", "native"], ["--decode", "ragged"], ["--decode", "ragged", "--question", "hidden"]):
            with self.subTest(extra):
                full, evicted = self.json(*arguments, "--kv", "f32", "--fa", "off", *extra)["runs"]
                self.assertEqual([t["tokens"] for t in full["turns"]], [t["tokens"] for t in evicted["turns"]])

    def test_quantised_cache(self):
        for decoder in ("native", "ragged"):
            run = self.one_run("-f", self.document, "--heads", "uniform", "--kv", "q8_0", "--decode", decoder)
            self.assertEqual(len(run["tokens"]), 5)

    def test_sliding_layers(self):
        for decoder in ("native", "ragged"):
            for text in (self.document, self.write("inside.txt", letters(40))):
                run = self.one_run("-f", text, "-p", "abc", "-p", "xyz", "--heads", "uniform", "--decode", decoder,
                                   model="sliding")
                self.assertEqual([len(turn["tokens"]) for turn in run["turns"]], [5, 5])


class Turns(CommandLineTest):
    def test_seen(self):
        result = self.json("-f", self.document, "-p", "abc", "-p", "xyz", "-p", "", model="chat")
        self.assertEqual([t["question"] for t in result["runs"][0]["turns"]], ["abc", "xyz", ""])
        first = self.json("-f", self.document, "-p", "abc", model="chat")
        self.assertEqual(result["prompt_tokens"], first["prompt_tokens"])
        self.assertEqual(result["runs"][0]["turns"][0], first["runs"][0]["turns"][0])

    def test_hidden_questions_start_from_the_same_cache(self):
        for extra in (["--decode", "native", "--heads", "uniform"], ["--decode", "ragged"], ["--policy", "full"],
                      ["--fa", "off"]):
            for model in ("chat", "sliding"):
                with self.subTest(extra=extra, model=model):
                    arguments = ["-f", self.document, "--question", "hidden", *extra]
                    both = self.json(*arguments, "-p", "abc", "-p", "xyz", model=model)
                    alone = self.json(*arguments, "-p", "xyz", model=model)
                    self.assertEqual(both["question"], "hidden")
                    self.assertEqual(both["prompt_tokens"], alone["prompt_tokens"])
                    self.assertEqual(both["runs"][0]["turns"][1], alone["runs"][0]["turns"][0])

    def test_hidden_without_a_question_continues_the_document(self):
        for extra in (["--policy", "full"], ["--decode", "native", "--heads", "uniform"], ["--decode", "ragged"],
                      ["--decode", "ragged", "--fa", "off"]):
            with self.subTest(extra):
                arguments = ["-f", self.document, "--raw", "--budget", "100%", *extra]
                seen = self.one_run("-f", self.write("blank.txt", letters(300) + "\n\n"), *arguments[2:])
                hidden = self.one_run(*arguments, "--question", "hidden")
                self.assertEqual(hidden["tokens"], seen["tokens"])

    def test_context_limits_the_answers(self):
        """Also where the most tokens asked for are more than any memory holds."""
        for count in ("50", "2000000000"):
            result = self.json("-f", self.document, "--ctx", "303", "--max-tokens", count, "--compare", "full")
            self.assertEqual([len(run["tokens"]) for run in result["runs"]], [3, 3])
            error = self.refused(self.run_arguments("--json", "-f", self.document, "-p", "abc", "-p", "xyz", "--ctx",
                                                    "310", "--max-tokens", count), "--ctx", "310")
            self.assertIn("next question", error)


class Repeatability(CommandLineTest):
    def test_same_command_same_tokens(self):
        runs = [self.one_run("-f", self.document, "-p", "abc") for _ in range(2)]
        self.assertEqual(runs[0]["tokens"], runs[1]["tokens"])
        self.assertEqual(kept_and_error(runs[0]), kept_and_error(runs[1]))

    def test_threads_make_no_difference(self):
        arguments = ["-f", self.document, "--compare", "snapkv", "--budget", "10%,30%"]
        results = [[kept_and_error(run) + (run["tokens"],) for run in self.json(*arguments, "--threads", t)["runs"]]
                   for t in ("1", "2", "3")]
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])

    def test_temperature_and_seed(self):
        def tokens(*extra):
            return self.one_run("-p", "abc", "--max-tokens", "12", *extra)["tokens"]

        greedy = tokens()
        self.assertEqual(greedy, tokens("--temp", "0", "--seed", "9"))
        self.assertEqual(tokens("--temp", "2", "--seed", "7"), tokens("--temp", "2", "--seed", "7"))
        self.assertNotEqual(tokens("--temp", "2", "--seed", "7"), tokens("--temp", "2", "--seed", "8"))

    def test_max_tokens(self):
        longest = self.one_run("-p", "abc", "--max-tokens", "9")["tokens"]
        for count in (1, 4, 9):
            run = self.one_run("-p", "abc", "--max-tokens", str(count))
            self.assertEqual(run["tokens"], longest[:count])
            self.assertFalse(run["turns"][0]["ended"])


class Terminal(CommandLineTest):
    def test_interrupt_ends_a_prefill(self):
        text = self.write("long.txt", letters(6000))
        command = [PROGRAM, *self.run_arguments("-f", text, "--threads", "1", model="slow")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.assertTrue(process.stderr.readline().startswith(b"prefill "))
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            out, error = process.communicate(timeout=SECONDS)
            self.assertLess(time.monotonic() - start, 5)
        self.assertEqual((process.returncode, out), (130, b""))
        self.assertTrue(error.endswith(b"dropkv: stopped on request\n"), error)

    def test_questions_from_a_terminal(self):
        """Two questions, then the end of input (Ctrl-D)."""
        master, slave = pty.openpty()
        command = [PROGRAM, *self.run_arguments("-f", self.document, model="chat")]
        with subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            os.close(slave)
            os.write(master, b"abc\nxyz\n\x04")
            out, error = process.communicate(timeout=SECONDS)
        os.close(master)
        self.assertEqual(process.returncode, 0, error)
        self.assertEqual(out.count(b"> "), 3 + out.count(b" -> "))
        self.assertIn(b"\npolicy ", out)


if __name__ == "__main__":
    unittest.main()
