"""What the tests of `dropkv eval` share: samples of letters, a run that must go well, rows compared but for the times."""

import json
import shutil

from command_line import CommandLineTest, letters

TIMES = ("prefill_s", "score_s", "compact_s", "decode_s")


def without_times(lines):
    """The same bytes but for the times: fields in their order, numbers as they were written."""
    rows = [json.loads(line, parse_float=str) for line in lines]
    return [json.dumps({key: value for key, value in row.items() if key not in TIMES}) for row in rows]


def without_kl(rows):
    return [{key: value for key, value in row.items() if key not in (*TIMES, "kl")} for row in rows]


class EvalTest(CommandLineTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.samples = cls.write_samples("samples.jsonl", 3)

    @classmethod
    def write_samples(cls, name, count, length=250, **fields):
        lines = [json.dumps({"index": i, "task": "made", "context": letters(length + 10 * i, seed=i + 1),
                             "question": letters(20, seed=i + 50), "outputs": ["a"], "max_tokens": 6, **fields})
                 for i in range(count)]
        return cls.write(name, "\n".join(lines) + "\n")

    def out(self, name):
        folder = self.folder / f"{self.id()}.{name}"
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def arguments(self, out, *arguments, model="chat", suite=None, ignore_eos=True):
        defaults = {"--policies": "dropkv,snapkv", "--budgets": "10%,64", "--threads": "1"}
        extra = [part for flag, value in defaults.items() if flag not in arguments for part in (flag, value)]
        if ignore_eos:
            extra.append("--ignore-eos")
        return ["eval", "-m", self.model(model), "--suite", suite or self.samples, "--out", str(out), *extra,
                *arguments]

    def evaluate(self, out, *arguments, **settings):
        """The rows of the folder behind a run that must go well."""
        done = self.call(*self.arguments(out, *arguments, **settings))
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        self.printed = done.stdout.decode()
        self.said = done.stderr.decode()
        return self.rows(out)

    def assert_alike(self, rows, others, tolerance):
        """But for the times, and divergences that differ by rounding: a batch adds up in another order."""
        self.assertEqual(without_kl(rows), without_kl(others))
        for row, other in zip(rows, others):
            self.assertEqual("kl" in row, "kl" in other)
            self.assertAlmostEqual(row.get("kl", 0), other.get("kl", 0), delta=tolerance)

    def rows(self, out):
        return [json.loads(line) for line in self.lines(out)]

    def lines(self, out):
        return (out / "results.jsonl").read_text().splitlines()

    def record(self, out):
        return json.loads((out / "run.json").read_text())
