"""Runs the program `dropkv` on tiny models. The environment names the two programs: DROPKV_CLI, DROPKV_WRITE_MODELS."""

import json
import os
import pathlib
import random
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["DROPKV_CLI"]
WRITE_MODELS = os.environ["DROPKV_WRITE_MODELS"]
SECONDS = 300  # a limit for one call; usually it is over in a tenth of a second


def letters(count, seed=1):
    """Text of `count` characters that are a token each: the tiny models know no pair of these."""
    generator = random.Random(seed)
    return "".join(generator.choice("bcdfgjklmpqsuvwxyz ") for _ in range(count))


class CommandLineTest(unittest.TestCase):
    """Has a folder with the models, and a document of 300 characters."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="dropkv_cli_")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        subprocess.run([WRITE_MODELS, folder.name], check=True)
        cls.document = cls.write("document.txt", letters(300))

    @classmethod
    def write(cls, name, content):
        path = cls.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    @classmethod
    def model(cls, name):
        return str(cls.folder / f"{name}.gguf")

    def call(self, *arguments, stdin=b""):
        """The finished process; it must not have been killed by a signal."""
        done = subprocess.run([PROGRAM, *arguments], input=stdin, capture_output=True, timeout=SECONDS)
        self.assertGreaterEqual(done.returncode, 0, f"killed by a signal: {arguments}\n{done.stderr.decode()}")
        return done

    def run_arguments(self, *arguments, model="plain"):
        settings = {"--threads": "1", "--max-tokens": "5"}
        defaults = [part for flag, value in settings.items() if flag not in arguments for part in (flag, value)]
        return ["run", "-m", self.model(model), "--ignore-eos", *defaults, *arguments]

    def refused(self, arguments, *parts, code=2):
        """Nothing on standard output, one line on standard error that holds `parts`."""
        done = self.call(*arguments)
        error = done.stderr.decode()
        self.assertEqual(done.returncode, code, error)
        self.assertEqual(done.stdout, b"")
        self.assertTrue(error.startswith("dropkv: ") and error.count("\n") == 1 and error.endswith("\n"), error)
        for part in parts:
            self.assertIn(part, error)
        return error

    def table(self, *arguments, model="plain", stdin=b""):
        """Standard output of a run that must go well."""
        done = self.call(*self.run_arguments(*arguments, model=model), stdin=stdin)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        return done.stdout.decode(errors="replace")

    def json(self, *arguments, model="plain", stdin=b""):
        """The object that a run with --json writes; standard output holds nothing else, standard error nothing."""
        done = self.call(*self.run_arguments("--json", *arguments, model=model), stdin=stdin)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        self.assertEqual(done.stderr, b"")
        return json.loads(done.stdout.decode())

    def one_run(self, *arguments, **settings):
        runs = self.json(*arguments, **settings)["runs"]
        self.assertEqual(len(runs), 1)
        return runs[0]
