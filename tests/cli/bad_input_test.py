#!/usr/bin/env python3
"""What `dropkv` refuses: each with a message that names the argument, exit code 1 or 2, nothing on standard output."""

import os
import unittest

from command_line import CommandLineTest, letters


class WrongModel(CommandLineTest):
    def refuse(self, path, *parts, code=2):
        return self.refused(["run", "-m", str(path), "-p", "abc"], *parts, code=code)

    def test_no_model(self):
        self.refused(["run", "-p", "abc"], "--model", "expected a GGUF file")

    def test_missing_file(self):
        self.refuse(self.folder / "nowhere.gguf", "--model", "no such file", "nowhere.gguf")

    def test_directory(self):
        self.refuse(self.folder, "--model", "directory")

    def test_not_a_gguf(self):
        self.refuse(self.model("text"), "--model", "expected a GGUF file", "text.gguf")

    def test_empty_file(self):
        self.refuse(self.write("empty.gguf", ""), "--model", "expected a GGUF file")

    def test_truncated(self):
        for name in ("truncated", "truncated_early"):
            with self.subTest(name):
                self.refuse(self.model(name), "--model", "cannot load", f"{name}.gguf: ")

    def test_unsupported_architectures(self):
        """Before a prefill: the only line on standard error is the reason."""
        reasons = {"recurrent": "recurrent", "encoder_decoder": "encoder-decoder", "latent": "MLA", "alibi": "ALiBi"}
        for name, reason in reasons.items():
            with self.subTest(name):
                self.refuse(self.model(name), "model '", "architecture", reason, code=1)


class WrongPrompt(CommandLineTest):
    def refuse(self, *arguments, parts, code=2, model="plain"):
        return self.refused(self.run_arguments(*arguments, model=model), *parts, code=code)

    def test_empty(self):
        empty = self.write("empty.txt", "")
        for model in ("plain", "bos", "chat"):
            for arguments in (["-p", ""], ["-f", empty], ["-f", empty, "-p", ""], ["-f", "-"], []):
                with self.subTest(model=model, arguments=arguments):
                    self.refuse(*arguments, parts=["prompt is empty", "--file", "--prompt"], model=model)

    def test_longer_than_context(self):
        text = self.write("longer.txt", letters(200))
        self.refuse("-f", text, "--ctx", "100", parts=["--ctx", "200 tokens", "100"])
        self.refuse("-f", text, parts=["--ctx", "200 tokens", "128"], model="short")

    def test_unreadable(self):
        self.refuse("-f", str(self.folder / "nowhere.txt"), parts=["--file", "nowhere.txt"], code=1)
        self.refuse("-f", str(self.folder), parts=["--file", "directory"], code=1)
        # Opens, but the first read fails.
        self.refuse("-f", "/proc/self/mem", parts=["--file", "/proc/self/mem"], code=1)

    @unittest.skipIf(os.geteuid() == 0, "root reads everything")
    def test_no_permission(self):
        path = self.write("secret.txt", "abc")
        os.chmod(path, 0)
        self.refuse("-f", path, parts=["--file", "secret.txt"], code=1)

    def test_hidden_without_document(self):
        self.refuse("-p", "abc", "--question", "hidden", parts=["--question hidden", "--file"])


class WrongFlag(CommandLineTest):
    def refuse(self, *arguments, parts=(), code=2):
        flag = next(a for a in arguments if a.startswith("-"))
        return self.refused(self.run_arguments("-p", "abc", *arguments), flag, *parts, code=code)

    def test_budget(self):
        for text in ("0", "-1", "150%", "0%", "-5%", "nan", "nan%", "inf", "1e2", "x", "", "10%,x", "10%,,5%", "10%,",
                     "10 %", "99999999999999999999"):
            with self.subTest(text):
                self.refuse("--budget", text)

    def test_budget_suggestions(self):
        self.refuse("--budget", "0.05", parts=["did you mean 5%?"])
        self.refuse("--budget", "5", parts=["write 5%"])

    def test_budget_below_window_and_sinks(self):
        self.refuse("--budget", "11", "--window", "8", "--sink", "4", parts=["at least 12", "got 11"])
        error = self.refuse("--budget", "32", "--compare", "snapkv", "--own-settings", parts=["at least 64", "snapkv"])
        self.assertNotIn("dropkv-ahead", error)

    def test_policies(self):
        self.refuse("--policy", "snap", parts=["adadropkv", 'got "snap"'])
        self.refuse("--compare", "full,snap", parts=["streaming", 'got "snap"'])

    def test_settings(self):
        for flag, values in {
            "--window": ("0", "200", "-1", "x", "1.5"),
            "--pool": ("4", "0", "-3", "x", "3,", "max:", "9999"),
            "--sink": ("-1", "x"),
            "--alpha": ("2", "-0.1", "nan", "x"),
            "--heads": ("x", "UNIFORM"),
            "--decode": ("x",),
            "--kv": ("x", "q4_0"),
            "--fa": ("x", "auto"),
            "--question": ("x",),
            "--max-tokens": ("0", "-1", "x"),
            "--threads": ("-1", "x"),
            "--ctx": ("-1", "x"),
            "--temp": ("-1", "nan", "inf", "x"),
            "--seed": ("-1", "x"),
        }.items():
            for value in values:
                with self.subTest(flag=flag, value=value):
                    self.refuse(flag, value)

    def test_quantised_cache_without_flash_attention(self):
        self.refuse("--kv", "q8_0", "--fa", "off", parts=["--fa off"])

    def test_unknown_flag_and_missing_value(self):
        self.refuse("--bugdet", "10%", parts=["--help"])
        self.refuse("--budget")
        self.refuse("--ctx", "400", "--ctx", "500")
        self.refused(self.run_arguments("abc"), "abc", "--help")

    def test_subcommands(self):
        self.refused(["evict"], "'evict'", "run", "--help")
        done = self.call()
        self.assertEqual((done.returncode, done.stdout), (2, b""))
        self.assertIn(b"usage: dropkv", done.stderr)

    def test_native_decoding_of_ragged_heads(self):
        done = self.call(*self.run_arguments("-f", self.document, "--heads", "ada", "--decode", "native"))
        self.assertEqual((done.returncode, done.stdout), (2, b""))
        for part in (b"--decode native", b"--heads uniform", b"--decode ragged"):
            self.assertIn(part, done.stderr)

    def test_native_decoding_of_ragged_layers(self):
        for name in ("cake", "layerdefensivekv", "pyramidkv-original", "defensivekv"):
            with self.subTest(name):
                done = self.call(*self.run_arguments("-f", self.document, "--policy", name, "--budget", "60%",
                                                     "--decode", "native"))
                self.assertEqual((done.returncode, done.stdout), (2, b""))
                for part in (b"--decode native", name.encode(), b"--decode ragged"):
                    self.assertIn(part, done.stderr)

    def test_flags_that_a_policy_does_not_take(self):
        self.refuse("--window", "8", "--policy", "tova", parts=["expected 1"])
        self.refused(self.run_arguments("-p", "abc", "--policy", "chunkkv", "--heads", "ada"), "--policy", "chunkkv")

    def test_budget_below_what_a_policy_protects(self):
        self.refuse("--budget", "11", "--policy", "compactor", parts=["at least 12", "compactor"])


if __name__ == "__main__":
    unittest.main()
